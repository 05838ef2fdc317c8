"""Settings of mixtures of experts."""
