"""Contracts that every role, environment and workload must keep."""
