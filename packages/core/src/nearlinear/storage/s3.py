"""S3 buckets, or any service that implements the S3 API (AWS_ENDPOINT_URL).

S3 has no rename and needs none here: an object exists completely or not at all. Large objects are
uploaded as multipart uploads and downloaded as ranges, several at a time, without a copy on disk.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import StorageError
from .path import StoragePath, StorageUnreachable
from .threads import map_concurrent

log = logging.getLogger(__name__)

PART_BYTES = 8 * 2**20
"""Size of an uploaded part or a downloaded range; larger for files of more than MAX_PARTS parts."""
MAX_PARTS = 10_000
PARTS_IN_FLIGHT = 8
"""Concurrent parts. A single connection is slower than the network; parts are held in memory."""
ATTEMPTS = 4
"""Attempts per range when a connection breaks while the body is read. boto3 retries calls."""
KEYS_PER_DELETE = 1000
CONNECT_TIMEOUT = 10  # seconds
MAX_CONNECTIONS = 32

_RENEW = "renew them (aws sso login), or use a role, which renews itself"
_CONFIGURE = "run aws configure, or give the machine a role"
_REMEDIES = {
    "NoSuchBucket": "the bucket does not exist: create it, or correct its name",
    "AccessDenied": "allow this role s3:ListBucket on the bucket, and s3:GetObject, "
    "s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload on its objects",
    "ExpiredToken": f"the credentials have expired: {_RENEW}",
    "InvalidAccessKeyId": f"the credentials are not valid: {_CONFIGURE}",
    "SignatureDoesNotMatch": f"the credentials are not valid: {_CONFIGURE}",
    "PermanentRedirect": "the bucket is in another region: export AWS_DEFAULT_REGION=...",
    "SlowDown": "S3 throttles these requests: try again in a minute",
}
"""Cause and remedy by S3 error code."""
_SYNONYMS = {
    "403": "AccessDenied",  # responses to HEAD carry no error code
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
_NOT_FOUND = {"NoSuchKey", "404"}

_client_lock = threading.Lock()


def boto3_session(region: str = "") -> Any:
    """Create a boto3 session that shares parsed service descriptions within this process.

    A service description is parsed when its first client is created, which takes a second for EC2
    and a quarter of a second for S3. boto3 alone caches the result only per session.

    Args:
        region: AWS region; the environment's if empty.

    Raises:
        ImportError: boto3 is not installed.
        botocore.exceptions.BotoCoreError: The AWS settings cannot be read.
    """
    import boto3.session
    import botocore.session

    core = botocore.session.get_session()
    core.register_component("data_loader", _data_loader(core.get_config_variable("data_path")))
    return boto3.session.Session(botocore_session=core, region_name=region or None)


@functools.cache
def _data_loader(data_path: str | None) -> Any:
    """Return botocore's loader, which searches ``data_path`` (AWS_DATA_PATH) first."""
    from botocore.loaders import create_loader

    return create_loader(data_path)


def s3_client() -> Any:
    """Return this process's S3 client for the current AWS settings in the environment.

    Raises StorageError if boto3 is missing or the settings are invalid.
    """
    settings = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    with _client_lock:  # ranks may be threads, and sessions are not thread-safe
        return _cached_client(settings)


@functools.lru_cache(maxsize=2)
def _cached_client(settings: tuple[tuple[str, str], ...]) -> Any:
    try:
        import boto3.session  # noqa: F401
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise StorageError('s3:// needs boto3: pip install "nearlinear[s3]"') from None
    config = Config(
        connect_timeout=CONNECT_TIMEOUT,
        max_pool_connections=MAX_CONNECTIONS,
        tcp_keepalive=True,
    )
    try:
        return boto3_session().client("s3", config=config)
    except (BotoCoreError, ValueError) as error:  # ValueError: the endpoint is not a URL
        raise StorageError(
            f"cannot create an S3 client: {error}. Correct the AWS_* variables, or {_CONFIGURE}"
        ) from None


@contextlib.contextmanager
def translate_errors(path: StoragePath, raise_connection_errors: bool = True) -> Iterator[None]:
    """Convert boto3 errors in the block to FileNotFoundError or StorageUnreachable, in one line.

    With ``raise_connection_errors`` False, a broken connection ends the block without an error, so
    that the caller can retry.
    """
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        yield
    except ClientError as error:
        raise _translate_response(path, error) from None
    except NoCredentialsError:
        raise StorageUnreachable(f"{path}: no AWS credentials found: {_CONFIGURE}") from None
    except BotoCoreError as error:
        if raise_connection_errors:
            reason = " ".join(str(error).split()).rstrip(".")
            raise StorageUnreachable(
                f"{path}: {reason}; check the network and AWS_ENDPOINT_URL, then start again"
            ) from None


def _translate_response(path: StoragePath, error: Any) -> Exception:
    details = error.response.get("Error", {})
    code: str = details.get("Code", "")
    if code in _NOT_FOUND:
        return FileNotFoundError(errno.ENOENT, "No such object", str(path))
    known_code: str = _SYNONYMS.get(code, code)
    if known_code == "ExpiredToken":
        _cached_client.cache_clear()  # the next client reads renewed credentials
    message = " ".join(details.get("Message", "").split()).rstrip(".")
    remedy = _REMEDIES.get(known_code) or "try again in a minute"
    return StorageUnreachable(f"{path}: {error.operation_name} failed, {code}: {message}; {remedy}")


def upload_checksum(client: Any) -> dict[str, str]:
    """Return the checksum argument of an upload, if the client computes checksums."""
    calculation = getattr(client.meta.config, "request_checksum_calculation", "")
    return {"ChecksumAlgorithm": "CRC32"} if calculation == "when_supported" else {}


@dataclass(frozen=True)
class S3Path(StoragePath):
    """``s3://bucket/key``: an object, or the prefix of the objects below it."""

    bucket: str
    key: str

    path = None

    @classmethod
    def parse(cls, address: str) -> S3Path:
        """Parse ``bucket/key``. Raises StorageError without a bucket or without boto3."""
        bucket, _, key = address.partition("/")
        if not bucket:
            raise StorageError("s3:// names no bucket: write s3://bucket/prefix")
        s3_client()  # reports a missing boto3 now rather than at the first access
        return cls(bucket, "/".join(part for part in key.split("/") if part))

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> S3Path:
        return S3Path(self.bucket, f"{self.key}/{name}".lstrip("/"))

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> S3Path:
        return S3Path(self.bucket, self.key.rpartition("/")[0])

    @property
    def _prefix(self) -> str:
        """Common prefix of the keys in this directory."""
        return f"{self.key}/" if self.key else ""

    @property
    def _object(self) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.key}

    def exists(self) -> bool:
        with translate_errors(self):
            page = s3_client().list_objects_v2(Bucket=self.bucket, Prefix=self._prefix, MaxKeys=1)
        return page["KeyCount"] > 0

    # Files

    def size(self) -> int:
        with translate_errors(self):
            return s3_client().head_object(**self._object)["ContentLength"]

    def read(self) -> bytes:
        return self._get()

    def stream(self, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        stop = self.size() if end is None else end
        return map_concurrent(
            lambda start: self._get(start, min(start + PART_BYTES, stop)),
            range(begin, stop, PART_BYTES),
            PARTS_IN_FLIGHT,
        )

    def _get(self, begin: int = 0, end: int | None = None) -> bytes:
        """Download the object, or its bytes [begin, end), in one request."""
        byte_range = {} if end is None else {"Range": f"bytes={begin}-{end - 1}"}
        for attempt in range(ATTEMPTS):
            with translate_errors(self, raise_connection_errors=attempt == ATTEMPTS - 1):
                body = s3_client().get_object(**self._object, **byte_range)["Body"].read()
                if end is not None and len(body) != end - begin:
                    raise OSError(errno.EIO, "The object became shorter while it was read")
                return body
            time.sleep(0.1 * 4**attempt)
        raise AssertionError("the last attempt returns or raises")

    def write(self, chunks: Iterable[memoryview], size: int) -> None:
        part_bytes = max(PART_BYTES, -(-size // MAX_PARTS))
        parts = _split_into_parts(chunks, part_bytes)
        with translate_errors(self):
            if size <= part_bytes:
                s3_client().put_object(**self._object, Body=b"".join(parts))
            else:
                self._upload_parts(parts)

    def _upload_parts(self, parts: Iterable[bytes]) -> None:
        client = s3_client()
        self._abort_uploads(self.key)  # left by a killed rank
        checksum = upload_checksum(client)
        upload = client.create_multipart_upload(**self._object, **checksum)["UploadId"]

        def send(numbered_part: tuple[int, bytes]) -> dict[str, Any]:
            number, part = numbered_part
            response = client.upload_part(
                **self._object, UploadId=upload, PartNumber=number, Body=part, **checksum
            )
            tags = {key: response[key] for key in ("ETag", "ChecksumCRC32") if key in response}
            return tags | {"PartNumber": number}

        try:
            sent = list(map_concurrent(send, enumerate(parts, 1), PARTS_IN_FLIGHT))
            client.complete_multipart_upload(
                **self._object, UploadId=upload, MultipartUpload={"Parts": sent}
            )
        except BaseException:
            try:
                with translate_errors(self):
                    client.abort_multipart_upload(**self._object, UploadId=upload)
            except (OSError, StorageUnreachable) as error:
                log.warning(
                    "cannot abort the upload of %s, whose parts continue to cost money: %s",
                    self, error,
                )  # fmt: skip
            raise

    def remove(self) -> None:
        with translate_errors(self):
            s3_client().delete_object(**self._object)

    # Directories

    def file_sizes(self) -> dict[str, int]:
        return {
            item["Key"].removeprefix(self._prefix): item["Size"]
            for page in self._pages("list_objects_v2", Prefix=self._prefix, Delimiter="/")
            for item in page.get("Contents", ())
        }

    def subfolders(self) -> list[StoragePath]:
        return [
            S3Path(self.bucket, item["Prefix"].rstrip("/"))
            for page in self._pages("list_objects_v2", Prefix=self._prefix, Delimiter="/")
            for item in page.get("CommonPrefixes", ())
        ]

    def mkdir(self) -> None:
        """Do nothing: a prefix exists with its first object."""

    def sync(self) -> None:
        """Do nothing: S3 confirms an object only after it is durable."""

    def rmtree(self) -> None:
        for page in self._pages("list_objects_v2", Prefix=self._prefix):
            keys = [{"Key": item["Key"]} for item in page.get("Contents", ())]
            for start in range(0, len(keys), KEYS_PER_DELETE):
                request = {"Objects": keys[start : start + KEYS_PER_DELETE], "Quiet": True}
                with translate_errors(self):
                    response = s3_client().delete_objects(Bucket=self.bucket, Delete=request)
                if errors := response.get("Errors"):
                    raise StorageUnreachable(
                        f"s3://{self.bucket}/{errors[0]['Key']} cannot be deleted "
                        f"({errors[0]['Code']}): allow this role s3:DeleteObject there"
                    )
        self._abort_uploads(self._prefix)

    def check_writable(self) -> None:
        trial = self / f".trial-{uuid.uuid4().hex}"
        trial.put(b"")
        trial.remove()

    def list_objects(self) -> Iterator[dict[str, Any]]:
        """Yield S3's description of each object whose key starts with this path's key."""
        for page in self._pages("list_objects_v2", Prefix=self.key):
            yield from page.get("Contents", ())

    def copy_to(self, target: S3Path) -> None:
        """Copy the object within S3, without a download."""
        client = s3_client()
        with translate_errors(self):
            client.copy(self._object, target.bucket, target.key, ExtraArgs=upload_checksum(client))

    def _pages(self, operation: str, **arguments: str) -> Iterator[dict[str, Any]]:
        with translate_errors(self):
            paginator = s3_client().get_paginator(operation)
            yield from paginator.paginate(Bucket=self.bucket, **arguments)

    def _abort_uploads(self, prefix: str) -> None:
        """Abort unfinished multipart uploads below ``prefix``."""
        # Listing uploads needs a permission that nothing else needs, and another rank may have
        # aborted the same upload.
        with contextlib.suppress(StorageUnreachable, FileNotFoundError), translate_errors(self):
            for page in self._pages("list_multipart_uploads", Prefix=prefix):
                for item in page.get("Uploads", ()):
                    if item["Key"] == self.key or item["Key"].startswith(self._prefix):
                        s3_client().abort_multipart_upload(
                            Bucket=self.bucket, Key=item["Key"], UploadId=item["UploadId"]
                        )


def _split_into_parts(chunks: Iterable[memoryview], size: int) -> Iterator[bytes]:
    """Regroup ``chunks`` into parts of ``size`` bytes; the last part may be smaller."""
    pending: list[memoryview] = []
    room = size
    for chunk in chunks:
        while len(chunk) >= room:
            yield b"".join([*pending, chunk[:room]])
            chunk, pending, room = chunk[room:], [], size
        if chunk:
            pending.append(chunk)
            room -= len(chunk)
    if pending:
        yield b"".join(pending)
