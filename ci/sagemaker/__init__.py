"""What the SageMaker SDK would send for a job, beside what nearlinear sends: field by field."""
