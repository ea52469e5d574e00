"""Hints about what a worker should keep or fetch."""
