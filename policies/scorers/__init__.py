"""Scorers: give each candidate a cost; lower is better."""
