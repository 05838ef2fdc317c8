"""Input files in a bucket: which there are, and reading one as a file that can seek."""

import io
from collections.abc import Iterator

from data_prep.places import Place, at
from data_prep.sources.source import Input
from nearlinear.errors import DataError

LEAST, MOST = 64 * 1024, 8 * 1024 * 1024
"""bytes of a range that is fetched: the first after a seek, and those of a long read"""


def files_under(address: str, suffixes: tuple[str, ...]) -> Iterator[Input]:
    """The object `address`, or else those below it whose names end with one of `suffixes`.

    In sorted order. Raises `DataError` when there is none.
    """
    from nearlinear.storage.s3_client import told, using

    place = at(address)
    found = []
    with told(place):
        pages = using().get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=place.bucket, Prefix=place.key):
            found += page.get("Contents", ())
    below = f"{place.key}/" if place.key else ""
    meant = [each for each in found if each["Key"] == place.key] or [
        each
        for each in found
        if each["Key"].startswith(below) and each["Key"].endswith(suffixes or ("",))
    ]
    if not meant:
        kinds = " or ".join(suffixes[:2])
        raise DataError(f"there is no object {place}, and no {kinds} below it: check the address")
    for each in sorted(meant, key=lambda each: each["Key"]):
        changed = round(each["LastModified"].timestamp() * 1e9)
        yield Input(f"s3://{place.bucket}/{each['Key']}", each["Size"], changed)


def opened(address: str) -> "RemoteFile":
    """An object to read from. Raises `FileNotFoundError`, or a `NearlinearError`, as `at` does."""
    return RemoteFile(at(address))


class RemoteFile(io.RawIOBase):
    """An object of a bucket, fetched in ranges: small ones where it is sought, larger ones after.

    In memory is one range, of `MOST` bytes at most.
    """

    def __init__(self, place: Place):
        super().__init__()
        self._place, self._size = place, place.size()
        self._at = self._start = 0
        self._range, self._next = memoryview(b""), LEAST

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, into) -> int:
        into = memoryview(into).cast("B")
        if self._at >= self._size or not len(into):
            return 0
        if not self._start <= self._at < self._start + len(self._range):
            self._fetch(len(into))
        first = self._at - self._start
        some = self._range[first : first + len(into)]
        into[: len(some)] = some
        self._at += len(some)
        return len(some)

    def _fetch(self, wanted: int) -> None:
        goes_on = self._at == self._start + len(self._range)
        self._next = min(2 * self._next, MOST) if goes_on else LEAST
        end = min(self._at + min(max(self._next, wanted), MOST), self._size)
        self._range = memoryview(b"".join(self._place.stream(self._at, end)))
        self._start = self._at
