"""Filters: remove candidates that must not take a request."""
