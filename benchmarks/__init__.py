"""Benchmarks: ratios within one run, one command a table."""
