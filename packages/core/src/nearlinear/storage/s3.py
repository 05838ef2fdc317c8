"""Prefixes of a bucket: S3, or a service that speaks as S3 does (AWS_ENDPOINT_URL).

There is no rename, and none is needed: an object is there whole, or not at all. Large ones go up in
parts and come down in ranges, several at a time, with no copy on a disk in between.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..errors import StorageError
from .place import Place, Unreachable
from .s3_client import told, using
from .threads import side_by_side

log = logging.getLogger(__name__)

PART = 8 * 2**20
"""bytes of a part that goes up or comes down; more for files that would have too many"""
MOST_PARTS = 10_000
AT_ONCE = 8
"""parts under way: one connection alone is slower than the network, and each part is in memory"""
TRIES = 4
"""of a range whose connection breaks; calls as such are tried again by boto3"""
DELETED_AT_ONCE = 1000


@dataclass(frozen=True)
class S3(Place):
    """``s3://bucket/key``."""

    bucket: str
    key: str

    path = None

    @classmethod
    def named(cls, address: str) -> S3:
        """What is meant by ``bucket/key``. Raises StorageError."""
        bucket, _, key = address.partition("/")
        if not bucket:
            raise StorageError("s3:// names no bucket: write s3://bucket/prefix")
        using()  # says at once that boto3 is missing
        return cls(bucket, "/".join(part for part in key.split("/") if part))

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> S3:
        return S3(self.bucket, f"{self.key}/{name}".lstrip("/"))

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> S3:
        return S3(self.bucket, self.key.rpartition("/")[0])

    @property
    def _inside(self) -> str:
        """What the names of all that is in this folder begin with."""
        return f"{self.key}/" if self.key else ""

    @property
    def _object(self) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.key}

    def exists(self) -> bool:
        with told(self):
            found = using().list_objects_v2(Bucket=self.bucket, Prefix=self._inside, MaxKeys=1)
        return found["KeyCount"] > 0

    # A file.

    def size(self) -> int:
        with told(self):
            return using().head_object(**self._object)["ContentLength"]

    def read(self) -> bytes:
        return self._get()

    def stream(self, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        end = self.size() if end is None else end
        return side_by_side(
            lambda at: self._get(at, min(at + PART, end)), range(begin, end, PART), AT_ONCE
        )

    def _get(self, begin: int = 0, end: int | None = None) -> bytes:
        """The object, or this range of it, by one call."""
        wanted = {} if end is None else {"Range": f"bytes={begin}-{end - 1}"}
        for tried in range(TRIES):
            with told(self, broken_is_told=tried == TRIES - 1):
                found = using().get_object(**self._object, **wanted)["Body"].read()
                if end is not None and len(found) != end - begin:
                    raise OSError(errno.EIO, "It is shorter than it was")
                return found
            time.sleep(0.1 * 4**tried)
        raise AssertionError("the last try returns or raises")

    def write(self, chunks: Iterable[memoryview], size: int) -> None:
        each = max(PART, -(-size // MOST_PARTS))
        parts = _parts(chunks, each)
        with told(self):
            if size <= each:
                using().put_object(**self._object, Body=b"".join(parts))
            else:
                self._write_in_parts(parts)

    def _write_in_parts(self, parts: Iterable[bytes]) -> None:
        client = using()
        self._abort_uploads(self.key)  # of a rank that was killed
        kind = getattr(client.meta.config, "request_checksum_calculation", "")
        sums = {"ChecksumAlgorithm": "CRC32"} if kind == "when_supported" else {}
        number = client.create_multipart_upload(**self._object, **sums)["UploadId"]

        def send(numbered: tuple[int, bytes]) -> dict:
            place, part = numbered
            said = client.upload_part(
                **self._object, UploadId=number, PartNumber=place, Body=part, **sums
            )
            known = {word: said[word] for word in ("ETag", "ChecksumCRC32") if word in said}
            return known | {"PartNumber": place}

        try:
            sent = list(side_by_side(send, enumerate(parts, 1), AT_ONCE))
            client.complete_multipart_upload(
                **self._object, UploadId=number, MultipartUpload={"Parts": sent}
            )
        except BaseException:
            try:
                with told(self):
                    client.abort_multipart_upload(**self._object, UploadId=number)
            except (OSError, Unreachable) as error:
                log.warning("parts of %s are left, which cost money: %s", self, error)
            raise

    def remove(self) -> None:
        with told(self):
            using().delete_object(**self._object)

    # A folder.

    def sizes(self) -> dict[str, int]:
        return {
            found["Key"].removeprefix(self._inside): found["Size"]
            for page in self._pages("list_objects_v2", Prefix=self._inside, Delimiter="/")
            for found in page.get("Contents", ())
        }

    def folders(self) -> list[Place]:
        return [
            S3(self.bucket, found["Prefix"].rstrip("/"))
            for page in self._pages("list_objects_v2", Prefix=self._inside, Delimiter="/")
            for found in page.get("CommonPrefixes", ())
        ]

    def make(self) -> None:
        """A prefix is there with the first object."""

    def settle(self) -> None:
        """What S3 has answered for is safe."""

    def clear(self) -> None:
        for page in self._pages("list_objects_v2", Prefix=self._inside):
            names = [{"Key": found["Key"]} for found in page.get("Contents", ())]
            for at in range(0, len(names), DELETED_AT_ONCE):
                some = {"Objects": names[at : at + DELETED_AT_ONCE], "Quiet": True}
                with told(self):
                    faults = using().delete_objects(Bucket=self.bucket, Delete=some).get("Errors")
                if faults:
                    raise Unreachable(
                        f"s3://{self.bucket}/{faults[0]['Key']} cannot be deleted "
                        f"({faults[0]['Code']}): let this role do s3:DeleteObject there"
                    )
        self._abort_uploads(self._inside)

    def try_out(self) -> None:
        trial = self / f".trial-{uuid.uuid4().hex}"
        trial.put(b"")
        trial.remove()

    def _pages(self, call: str, **wanted) -> Iterator[dict]:
        with told(self):
            yield from using().get_paginator(call).paginate(Bucket=self.bucket, **wanted)

    def _abort_uploads(self, prefix: str) -> None:
        """Have the parts of files deleted that nobody will finish."""
        # The right to look is one that nothing else needs; another rank may have been here.
        with contextlib.suppress(Unreachable, FileNotFoundError), told(self):
            for page in self._pages("list_multipart_uploads", Prefix=prefix):
                for found in page.get("Uploads", ()):
                    if found["Key"] == self.key or found["Key"].startswith(self._inside):
                        using().abort_multipart_upload(
                            Bucket=self.bucket, Key=found["Key"], UploadId=found["UploadId"]
                        )


def _parts(chunks: Iterable[memoryview], size: int) -> Iterator[bytes]:
    """``chunks`` cut anew, into ``size`` bytes each, but for the last."""
    waiting: list[memoryview] = []
    room = size
    for chunk in chunks:
        while len(chunk) >= room:
            yield b"".join([*waiting, chunk[:room]])
            chunk, waiting, room = chunk[room:], [], size
        if chunk:
            waiting.append(chunk)
            room -= len(chunk)
    if waiting:
        yield b"".join(waiting)
