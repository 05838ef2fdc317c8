"""What moto's SageMaker lacks, added to it for as long as it is asked for.

Its training jobs are completed at once; these train until somebody stops them. Nothing runs.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def unfinished() -> Iterator[None]:
    """Inside, jobs that are created are in progress, and can be stopped."""
    from moto.core.responses import EmptyResult
    from moto.sagemaker.exceptions import ValidationError
    from moto.sagemaker.models import SageMakerModelBackend
    from moto.sagemaker.responses import SageMakerResponse

    create = SageMakerModelBackend.create_training_job

    def begin(backend, *arguments, **named):
        job = create(backend, *arguments, **named)
        job.training_job_status, job.secondary_status = "InProgress", "Training"
        return job

    def stop(response) -> EmptyResult:
        name = response._get_param("TrainingJobName")
        job = response.sagemaker_backend.training_jobs.get(name)
        if job is None:
            raise ValidationError(message="Requested resource not found.")
        if job.training_job_status != "InProgress":
            state = job.training_job_status
            raise ValidationError(message=f"The job is {state}, and cannot be stopped.")
        job.training_job_status = job.secondary_status = "Stopped"
        return EmptyResult()

    with (
        mock.patch.object(SageMakerModelBackend, "create_training_job", begin),
        mock.patch.object(SageMakerResponse, "stop_training_job", stop, create=True),
    ):
        yield
