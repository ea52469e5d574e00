"""Residency: what the gateway wishes of the workers' caches, how much of that it may wish, and what became of it."""
