"""Comparison of a small twin of the model, in the layout of a run, with one process."""
