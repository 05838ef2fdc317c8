"""Launch training jobs: on this machine, SageMaker, Slurm or Kubernetes.

`spec` describes a job, `validation` reports problems before submission, and `run_job` submits it.
"""
