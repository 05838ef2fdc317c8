"""In the SDK's environment: what it sends for each of `jobs`, to a server that speaks AWS.

``python -m ci.sagemaker.capture FOLDER`` submits them to the server at AWS_ENDPOINT_URL, with the
code in FOLDER, and prints the requests and the calls around them as JSON.
"""

import importlib.metadata
import json
import logging
import os
import sys
import warnings

from ci.sagemaker import jobs

ALLOWED = {"EvalActionName": "any", "EvalResourceName": "*", "EvalDecision": "allowed"}


def main(source: str) -> int:
    warnings.simplefilter("ignore")  # the SDK's, on its own modules
    logging.disable(logging.WARNING)
    heard: list[tuple[str, dict]] = []
    listen(heard)
    calls: dict[str, set[str]] = {"making it": set(), "train()": set()}
    requests = {name: submitted(name, source, heard, calls) for name in jobs.JOBS}
    found = {
        "sdk": importlib.metadata.version("sagemaker-train"),
        "calls": {stage: sorted(names) for stage, names in calls.items()},
        "requests": requests,
    }
    print(json.dumps(found))
    return 0


def submitted(name: str, source: str, heard: list, calls: dict[str, set[str]]) -> dict:
    """What the SDK asked the service for, submitting one job; adds to ``calls`` what it called."""
    from nearlinear.launch.sagemaker.model_trainer import model_trainer

    job, config = jobs.read(name, source)
    heard.clear()
    trainer = model_trainer(job, config)
    calls["making it"] |= {call for call, _ in heard}
    heard.clear()
    trainer.train(wait=False, logs=False)
    calls["train()"] |= {call for call, _ in heard}
    (made,) = [params for call, params in heard if call == "sagemaker:CreateTrainingJob"]
    return made


def listen(heard: list) -> None:
    """Add every call of any client to ``heard``; put in place what the server lacks.

    The SDK makes clients on sessions of its own, so that events of ours would not see them.
    """
    from botocore.client import BaseClient
    from sagemaker.core.helper import session_helper

    # The SDK calls STS at its public address whatever the endpoint is.
    session_helper.sts_regional_endpoint = lambda region: os.environ["AWS_ENDPOINT_URL"]
    call = BaseClient._make_api_call

    def heard_call(self, name, parameters):
        heard.append((f"{self.meta.service_model.signing_name}:{name}", parameters))
        if name == "SimulatePrincipalPolicy":  # the server has none: all is allowed
            return {"EvaluationResults": [ALLOWED], "IsTruncated": False}
        return call(self, name, parameters)

    BaseClient._make_api_call = heard_call


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
