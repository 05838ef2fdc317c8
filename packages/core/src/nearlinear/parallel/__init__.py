"""One module per technique; each stands on the mesh and none knows the training loop."""
