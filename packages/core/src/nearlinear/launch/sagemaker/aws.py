"""The AWS services a job talks to, through boto3: made here, failed here in words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ...errors import ConfigError, NearlinearError
from ...storage import sessions

DENIED = "nearlinear policies says what your user must be allowed"
REMEDIES = {
    "AccessDenied": DENIED,
    "AccessDeniedException": DENIED,
    "403": DENIED,  # where the answer names no code
    "ExpiredToken": "renew your credentials: aws sso login",
    "ExpiredTokenException": "renew your credentials: aws sso login",
    "InvalidClientTokenId": "these credentials are not known: aws configure",
    "InvalidAccessKeyId": "these credentials are not known: aws configure",
    "UnrecognizedClientException": "these credentials are not known: aws configure",
    "NoSuchBucket": "create it in the job's region, or name another in job.output",
    "PermanentRedirect": "the bucket is in another region: name that in job.region",
    "ThrottlingException": "AWS wants fewer calls: try again in a minute",
    "ResourceLimitExceeded": "ask for more in Service Quotas, or take fewer or other machines",
}
"""What to do about an error of AWS, by its code."""
PATIENCE = 10  # seconds for a connection; how often to try again is boto3's to know


class ServiceRefused(NearlinearError):
    """AWS said no, or could not be reached. ``code``: AWS's word for why, empty without one."""

    def __init__(self, message: str, code: str = ""):
        super().__init__(message)
        self.code = code


def session(region: str = ""):
    """A session of boto3. Raises ConfigError without boto3, region or credentials."""
    try:
        import boto3  # noqa: F401
        import botocore.exceptions
    except ImportError:
        raise ConfigError(
            'SageMaker jobs need boto3: pip install "nearlinear[sagemaker]"'
        ) from None
    try:
        found = sessions.session(region)
        credentials = found.get_credentials()
    except botocore.exceptions.BotoCoreError as error:  # a profile that is not there, say
        raise ConfigError(f"AWS credentials cannot be read: {error}") from None
    if found.region_name is None:
        raise ConfigError(
            "no AWS region: write job.region = us-west-2, or export AWS_DEFAULT_REGION=us-west-2"
        )
    if credentials is None:
        raise ConfigError(
            "no AWS credentials: run aws configure, or export AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )
    return found


def client(service: str, region: str = ""):
    """A client of ``service``. Raises as `session` does."""
    found = session(region)
    from botocore.config import Config  # session has said what to do without boto3
    from botocore.exceptions import BotoCoreError

    try:
        return found.client(service, config=Config(connect_timeout=PATIENCE))
    except (BotoCoreError, ValueError) as error:  # ValueError: an endpoint that is no URL
        raise ServiceRefused(f"{service}: {error}") from None


@contextlib.contextmanager
def told(doing: str) -> Iterator[None]:
    """What AWS answers to a call inside, as one line: which call, why not, what to do."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as error:
        found, answer = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
        code, status = found.get("Code", ""), answer.get("HTTPStatusCode", 0)
        if status >= 500:
            raise ServiceRefused(f"{doing}: {_failing(status)}", code) from None
        words = " ".join(found.get("Message", "").split()).rstrip(".")
        remedy = f"; {REMEDIES[code]}" if code in REMEDIES else ""
        raise ServiceRefused(f"{doing}: {code}: {words}{remedy}", code) from None
    except ResponseParserError:
        raise ServiceRefused(f"{doing}: {_failing()}") from None
    except BotoCoreError as error:
        raise ServiceRefused(f"{doing}: {error}") from None


def _failing(status: int = 0) -> str:
    """For an answer that is none: the service itself, or something before it, is broken."""
    which = f" (HTTP {status})" if status else ""
    return f"the service failed{which}, not your request: try again in a minute"


def bucket_and_key(uri: str) -> tuple[str, str]:
    """Of ``s3://bucket/some/key``."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key
