"""Compare nearlinear's SageMaker requests with those of the SageMaker SDK, field by field."""
