"""Benchmarks: the source of every figure in docs/PERFORMANCE.md and docs/PLANNING.md."""
