"""Benchmarks against libraries for the same purpose, measured in the same run."""
