"""Benchmarks whose numbers are checked in the same run: see docs/benchmarks.md for what a row means."""
