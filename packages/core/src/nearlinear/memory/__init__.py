"""Measured memory of a training step: see `measure.memory_report`."""
