"""The rules of residency: each one file, one reason to wish something of a worker's caches, and its numbers in the configuration."""
