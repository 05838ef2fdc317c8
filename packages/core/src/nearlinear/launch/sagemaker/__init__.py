"""Training jobs of Amazon SageMaker: the request, its faults, and what becomes of it."""
