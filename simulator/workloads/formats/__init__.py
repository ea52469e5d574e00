"""Recorded traffic: one module for each file format, each with a function that reads a path into a `Workload`."""
