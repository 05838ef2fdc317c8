"""Capture the SDK's requests: ``python -m ci.sagemaker_sdk.capture FOLDER``, in its environment.

Submits every job of `jobs` with the code in FOLDER to the server at AWS_ENDPOINT_URL, and prints
the requests and the AWS calls around them as JSON.
"""

import importlib.metadata
import json
import logging
import os
import sys
import warnings

from ci.sagemaker_sdk import jobs

ALLOWED = {"EvalActionName": "any", "EvalResourceName": "*", "EvalDecision": "allowed"}


def main(source: str) -> int:
    warnings.simplefilter("ignore")  # the SDK warns about its own modules
    logging.disable(logging.WARNING)
    recorded: list[tuple[str, dict]] = []
    record_calls(recorded)
    calls: dict[str, set[str]] = {"making it": set(), "train()": set()}
    requests = {name: submit(name, source, recorded, calls) for name in jobs.JOBS}
    found = {
        "sdk": importlib.metadata.version("sagemaker-train"),
        "calls": {stage: sorted(names) for stage, names in calls.items()},
        "requests": requests,
    }
    print(json.dumps(found))
    return 0


def submit(name: str, source: str, recorded: list, calls: dict[str, set[str]]) -> dict:
    """Submit one job with the SDK, return its request and add its AWS calls to ``calls``."""
    from nearlinear.launch.sagemaker.model_trainer import model_trainer

    job, config = jobs.read(name, source)
    recorded.clear()
    trainer = model_trainer(job, config)
    calls["making it"] |= {call for call, _ in recorded}
    recorded.clear()
    trainer.train(wait=False, logs=False)
    calls["train()"] |= {call for call, _ in recorded}
    (request,) = [params for call, params in recorded if call == "sagemaker:CreateTrainingJob"]
    return request


def record_calls(recorded: list) -> None:
    """Record every call of any client in ``recorded``, and emulate a call the server lacks.

    The SDK creates its own sessions, so that botocore events of another session do not fire.
    """
    from botocore.client import BaseClient
    from sagemaker.core.helper import session_helper

    # The SDK calls STS at its public address regardless of the configured endpoint.
    session_helper.sts_regional_endpoint = lambda region: os.environ["AWS_ENDPOINT_URL"]
    call = BaseClient._make_api_call

    def recording_call(self, name, parameters):
        recorded.append((f"{self.meta.service_model.signing_name}:{name}", parameters))
        if name == "SimulatePrincipalPolicy":  # not in the server: allow everything
            return {"EvaluationResults": [ALLOWED], "IsTruncated": False}
        return call(self, name, parameters)

    BaseClient._make_api_call = recording_call


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
