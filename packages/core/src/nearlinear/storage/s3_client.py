"""The client of S3 that this process uses, and what its errors mean."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
from collections.abc import Iterator

from ..errors import StorageError
from . import sessions
from .place import Place, Unreachable

PATIENCE = 10
"""seconds for a connection"""
CONNECTIONS = 32
_making = threading.Lock()

RENEW = "renew them (aws sso login), or run with a role, which renews itself"
KNOWN = "aws configure, or a role that the machine runs with"
REMEDIES = {
    "NoSuchBucket": "there is no such bucket: create it, or mend the name",
    "AccessDenied": "let this role do s3:ListBucket with the bucket, and s3:GetObject, "
    "s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload with what is in it",
    "ExpiredToken": f"the credentials have expired: {RENEW}",
    "InvalidAccessKeyId": f"the credentials are not known: {KNOWN}",
    "SignatureDoesNotMatch": f"the credentials are not known: {KNOWN}",
    "PermanentRedirect": "the bucket is in another region: export AWS_DEFAULT_REGION=...",
    "SlowDown": "S3 wants fewer calls: try again in a minute",
}
"""What is meant, and what to do, by the code of S3's answer."""
SAME = {
    "403": "AccessDenied",  # an answer to HEAD has no code of its own
    "AllAccessDisabled": "AccessDenied",
    "ExpiredTokenException": "ExpiredToken",
    "RequestExpired": "ExpiredToken",
    "TokenRefreshRequired": "ExpiredToken",
    "InvalidToken": "InvalidAccessKeyId",
    "301": "PermanentRedirect",
    "AuthorizationHeaderMalformed": "PermanentRedirect",
    "IllegalLocationConstraintException": "PermanentRedirect",
    "503": "SlowDown",
}
NOT_THERE = {"NoSuchKey", "404"}


def using():
    """The client of this process, by AWS's settings in the environment as they are now.

    Raises StorageError without boto3, and where the settings make no client.
    """
    settings = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    with _making:  # ranks may be threads, and sessions are not for several
        return _client(settings)


@functools.lru_cache(maxsize=2)
def _client(settings: tuple):
    try:
        import boto3.session  # noqa: F401
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise StorageError('s3:// needs boto3: pip install "nearlinear[s3]"') from None
    config = Config(connect_timeout=PATIENCE, max_pool_connections=CONNECTIONS, tcp_keepalive=True)
    try:
        return sessions.session().client("s3", config=config)
    except (BotoCoreError, ValueError) as error:  # ValueError: an endpoint that is no URL
        raise StorageError(f"s3:// cannot be used: {error}; mend AWS_*, or {KNOWN}") from None


@contextlib.contextmanager
def told(place: Place, broken_is_told: bool = True) -> Iterator[None]:
    """Raise what S3 says no to inside as FileNotFoundError or Unreachable, in one line.

    ``broken_is_told``: or is nothing raised of a connection that breaks, to try again.
    """
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        yield
    except ClientError as error:
        raise _of_answer(place, error) from None
    except NoCredentialsError:
        raise Unreachable(f"{place}: there are no AWS credentials: {KNOWN}") from None
    except BotoCoreError as error:
        if broken_is_told:
            words = " ".join(str(error).split()).rstrip(".")
            raise Unreachable(
                f"{place}: {words}; look at the network and AWS_ENDPOINT_URL, and start again"
            ) from None


def _of_answer(place: Place, error) -> Exception:
    said = error.response.get("Error", {})
    code = said.get("Code", "")
    if code in NOT_THERE:
        return FileNotFoundError(errno.ENOENT, "No such object", str(place))
    meant = SAME.get(code, code)
    if meant == "ExpiredToken":
        _client.cache_clear()  # so that the next one reads what has been renewed
    words = " ".join(said.get("Message", "").split()).rstrip(".")
    remedy = REMEDIES.get(meant) or "try again in a minute"
    return Unreachable(f"{place}: {error.operation_name} failed, {code}: {words}; {remedy}")
