"""Residency hints: what can be wished of a worker's caches, and the drivers that say it in one protocol each."""
