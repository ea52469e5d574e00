"""Pickers: choose one candidate, given the costs."""
