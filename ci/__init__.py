"""Build tooling, emulated infrastructure, benchmarks and validation of this repository.

- Tooling: ``environment``, ``notebooks``, ``browser``, ``prose``, ``torch_matrix``.
- Emulated clusters and services, also used by notebooks: ``emulation``.
- Benchmarks: ``benchmarks``; comparison with other libraries: ``benchmarks.compare``.
- Validation: ``planner_validation``, ``faults``, ``sagemaker_sdk``.
"""
