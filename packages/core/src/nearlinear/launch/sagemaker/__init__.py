"""Amazon SageMaker training jobs: build, validate and submit requests, and follow jobs."""
