"""Drivers: each knows one kind of worker's protocol."""
