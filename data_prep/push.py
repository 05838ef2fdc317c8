"""Upload a prepared folder to S3, for jobs that read it there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nearlinear import storage
from nearlinear.data.format import Manifest
from nearlinear.data.format.manifest import MANIFEST_FILE
from nearlinear.errors import ConfigError

CHUNK_BYTES = 8 * 2**20


def push(folder: str | Path, address: str, *, progress: bool = True) -> int:
    """Upload the token shards in ``folder`` below ``address``, and return the bytes sent.

    Files of the same name and size are kept, so that an interrupted upload can be repeated. The
    manifest is uploaded last: a dataset without one is not read.

    Args:
        folder: Folder written by ``nearlinear data prepare``.
        address: s3://bucket/prefix.
        progress: Print a line per file.

    Raises:
        ConfigError: ``address`` is not in S3.
        DataError: ``folder`` holds no token shards.
        StorageError: The bucket does not exist or refuses access.
    """
    if not address.startswith("s3://") or not address.removeprefix("s3://").strip("/"):
        raise ConfigError(f"{address!r} is not an S3 address: write s3://bucket/prefix")
    root, target = Path(folder), storage.as_path(address.rstrip("/"))
    Manifest.read(root)  # raises DataError
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    files.sort(key=lambda path: path.name == MANIFEST_FILE)
    there: dict[Path, dict[str, int]] = {}
    sent = 0
    for path in files:
        inside = path.parent.relative_to(root)
        place = target
        for name in inside.parts:
            place = place / name
        if inside not in there:
            there[inside] = place.file_sizes()
        size = path.stat().st_size
        if path.name != MANIFEST_FILE and there[inside].get(path.name) == size:
            continue
        (place / path.name).write(_chunks(path), size)
        sent += size
        if progress:
            print(f"{path.relative_to(root)}: {size / 2**20:.1f} MiB", flush=True)
    return sent


def _chunks(path: Path) -> Iterator[memoryview]:
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            yield memoryview(data)
