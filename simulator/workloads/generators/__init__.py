"""Made-up traffic: one module for each shape, each with a function that makes a `Workload` from numbers and a seed."""
