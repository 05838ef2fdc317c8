"""AWS clients through boto3, and translation of their errors into one-line messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ...errors import ConfigError, NearlinearError
from ...storage import s3

_DENIED = "nearlinear policies prints the permissions that your user needs"
_RENEW = "renew your credentials: aws sso login"
_UNKNOWN_CREDENTIALS = "AWS does not know these credentials: run aws configure"
REMEDIES = {
    "AccessDenied": _DENIED,
    "AccessDeniedException": _DENIED,
    "403": _DENIED,  # responses without an error code
    "ExpiredToken": _RENEW,
    "ExpiredTokenException": _RENEW,
    "InvalidClientTokenId": _UNKNOWN_CREDENTIALS,
    "InvalidAccessKeyId": _UNKNOWN_CREDENTIALS,
    "UnrecognizedClientException": _UNKNOWN_CREDENTIALS,
    "NoSuchBucket": "create it in the job's region, or name another in job.output",
    "PermanentRedirect": "the bucket is in another region: set job.region to it",
    "ThrottlingException": "too many requests: try again in a minute",
    "ResourceLimitExceeded": "request more in Service Quotas, or use fewer or other machines",
}
"""Remedy by AWS error code."""
CONNECT_TIMEOUT = 10  # seconds; retries are left to boto3


class AWSError(NearlinearError):
    """AWS rejected a request or could not be reached.

    ``code`` is the AWS error code, or empty if there was none.
    """

    def __init__(self, message: str, code: str = ""):
        super().__init__(message)
        self.code = code


def create_session(region: str = "") -> Any:
    """Return a boto3 session. Raises ConfigError without boto3, region or credentials."""
    try:
        import boto3  # noqa: F401
        import botocore.exceptions
    except ImportError:
        raise ConfigError(
            'SageMaker jobs need boto3: pip install "nearlinear[sagemaker]"'
        ) from None
    try:
        session = s3.boto3_session(region)
        credentials = session.get_credentials()
    except botocore.exceptions.BotoCoreError as error:  # an unknown profile, for example
        raise ConfigError(f"cannot read the AWS credentials: {error}") from None
    if session.region_name is None:
        raise ConfigError(
            "no AWS region: set job.region = us-west-2, or export AWS_DEFAULT_REGION=us-west-2"
        )
    if credentials is None:
        raise ConfigError(
            "no AWS credentials: run aws configure, or export AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )
    return session


def create_client(service: str, region: str = "") -> Any:
    """Return a boto3 client of ``service``.

    Raises:
        ConfigError: boto3, the region or the credentials are missing.
        AWSError: The endpoint is invalid.
    """
    session = create_session(region)
    from botocore.config import Config  # create_session has reported a missing boto3
    from botocore.exceptions import BotoCoreError

    try:
        return session.client(service, config=Config(connect_timeout=CONNECT_TIMEOUT))
    except (BotoCoreError, ValueError) as error:  # ValueError: the endpoint is not a URL
        raise AWSError(f"{service}: {error}") from None


@contextlib.contextmanager
def translate_errors(action: str) -> Iterator[None]:
    """Translate boto3 exceptions of the body into AWSError: "action: cause; remedy"."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as error:
        response: dict[str, Any] = dict(error.response)
        details, metadata = response.get("Error", {}), response.get("ResponseMetadata", {})
        code, status = details.get("Code", ""), metadata.get("HTTPStatusCode", 0)
        if status >= 500:
            raise AWSError(f"{action}: {_service_failure(status)}", code) from None
        message = " ".join(details.get("Message", "").split()).rstrip(".")
        remedy = f"; {REMEDIES[code]}" if code in REMEDIES else ""
        raise AWSError(f"{action}: {code}: {message}{remedy}", code) from None
    except ResponseParserError:
        raise AWSError(f"{action}: {_service_failure()}") from None
    except BotoCoreError as error:
        raise AWSError(f"{action}: {error}") from None


def _service_failure(status: int = 0) -> str:
    """Describe a failure of the service itself, or of a proxy in front of it."""
    which = f" (HTTP {status})" if status else ""
    return f"the service failed{which}, not your request: try again in a minute"


def bucket_and_key(uri: str) -> tuple[str, str]:
    """Split ``s3://bucket/some/key``."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key
