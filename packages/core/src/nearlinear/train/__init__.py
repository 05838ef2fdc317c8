"""The training loop: config, model, optimizer, metrics, and the `Trainer` that runs them."""
