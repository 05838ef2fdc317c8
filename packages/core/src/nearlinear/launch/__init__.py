"""Launch training jobs: on this machine, SageMaker, Slurm or Kubernetes.

`spec` describes a job and reports problems before submission; `run_job` submits it.
"""
