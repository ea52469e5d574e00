"""Benchmarks: they hold the figures that tests must not time. Run all with `make bench`, or one as `python -m bench.NAME`."""
