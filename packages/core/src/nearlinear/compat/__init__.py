"""Import names and semantics of the SageMaker model parallel library (SMP)."""
