"""Benchmarks that run in workers."""
