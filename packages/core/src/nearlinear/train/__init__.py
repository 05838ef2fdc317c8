"""Train a model from a config: the `Trainer`, its callbacks, metrics, data and checkpoints."""
