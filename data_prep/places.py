"""Folders of this machine and prefixes of a bucket (`s3://bucket/prefix`), by one name: a `Place`.

Where a rename makes work count on a disk, an object that is written last does in a bucket.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nearlinear import storage
from nearlinear.storage import Place
from nearlinear.storage.threads import side_by_side

__all__ = ["Place", "at", "beside", "elsewhere", "fetch", "in_turn", "lay", "on_disk", "room",
           "upload"]  # fmt: skip

AT_ONCE = 16
"""calls to a bucket under way: it answers as many as fast as one"""
_CHUNK = 1 << 20

elsewhere, on_disk = storage.elsewhere, storage.on_disk


def at(name: str | Path | Place) -> Place:
    """The place of that name; a path is made absolute."""
    place = storage.at(name)
    return place if place.path is None else storage.at(Path(os.path.abspath(place.path)))


def beside(place: Place, suffix: str) -> Place:
    """The place whose name is that one's and `suffix`."""
    return place.parent / (place.name + suffix)


def in_turn(place: Place, work: Callable, items: Iterable) -> Iterator:
    """`work` of every item, in their order; of several at a time where `place` is a bucket's."""
    return map(work, items) if place.path else side_by_side(work, items, AT_ONCE)


@contextmanager
def room(place: Place) -> Iterator[Path]:
    """A folder of this machine to work in: the place itself, or one that is removed after."""
    if place.path:
        yield place.path
        return
    with tempfile.TemporaryDirectory(prefix="nearlinear-") as folder:
        yield Path(folder)


def upload(folder: Path, place: Place, last: str) -> None:
    """Write all files of a folder to `place`; the one named `last` when the others are there."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    for name in [name for name in files if str(name) != last]:
        _write(folder / name, place / name.as_posix())
    _write(folder / last, place / last)


def fetch(place: Place, path: Path) -> None:
    """A copy of a file of a bucket at `path`, whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.at(path).write(map(memoryview, place.stream()), -1)


def lay(source: Place, target: Place) -> None:
    """The same file under another name: a link on a disk, else a copy.

    What goes from a disk into a bucket was made for that, and is removed from the disk.
    """
    if source.path is None:
        _copy_in_bucket(source, target)
    elif target.path is None:
        _write(source.path, target)
        source.remove()
    else:
        try:
            os.link(source.path, target.path)
        except OSError:  # a file system without links
            shutil.copyfile(source.path, target.path)
            with open(target.path, "rb") as file:
                os.fsync(file.fileno())


def _write(path: Path, place: Place) -> None:
    with open(path, "rb") as file:
        chunks = iter(lambda: file.read(_CHUNK), b"")
        place.write(map(memoryview, chunks), path.stat().st_size)


def _copy_in_bucket(source: Place, target: Place) -> None:
    """A copy that S3 makes itself: nothing of it comes here."""
    from nearlinear.storage.s3_client import told, using

    kind = getattr(using().meta.config, "request_checksum_calculation", "")
    sums = {"ChecksumAlgorithm": "CRC32"} if kind == "when_supported" else {}
    with told(source):
        using().copy(
            {"Bucket": source.bucket, "Key": source.key}, target.bucket, target.key, ExtraArgs=sums
        )
