"""Benchmarks of the engine, behind `umbel bench`: offline workloads, host time, long runs."""
