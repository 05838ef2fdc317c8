"""Benchmarks against peers: what others built for the same job, measured in the same run."""
