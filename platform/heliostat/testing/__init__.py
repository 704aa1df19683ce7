"""Contracts that every role, environment and workload must keep, and fakes to test against."""
