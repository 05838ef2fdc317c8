"""What is kept of a finished split: its record, and whether the files it tells of are intact."""

from collections.abc import Iterator
from pathlib import Path

import xxhash

from data_prep.job import Job, read_json
from data_prep.places import Place
from nearlinear.data.format import BLOCK_BYTES, SPLITS, Shard

LOG_FILE = "documents.log"
NEAR_FILE = "near.signatures"
RECORD_FILE = "record.json"


def split_folder(folder: Place, number: int) -> Place:
    """Where a finished split lies in the folder of an unfinished output."""
    return folder / f"splits/{number:05d}"


def finished(folder: Place) -> Iterator[Place]:
    """The folders of the splits that have a record, in order."""
    for place in sorted((folder / "splits").folders(), key=str):
        if not place.name.endswith(".tmp") and RECORD_FILE in place.sizes():
            yield place


def record_of(folder: Place, job: Job, number: int, check: bool = True) -> dict | None:
    """The record of a split that is done and (with `check`) intact; None when it is to be done.

    Of what lies in a bucket sizes are compared: an object is as it was sent, or not there.
    """
    place = split_folder(folder, number)
    record = read_json(place / RECORD_FILE)
    if record is None or record["job"] != job.identity:
        return None
    if not check:
        return record
    if place.path is None:
        return record if _all_there(place, record) else None
    place = place.path
    for shards in shards_of(record).values():
        for shard in shards:
            if not _intact(place / shard.file, shard.bytes, shard.blocks):
                return None
            if not _intact(place / shard.idx_file, shard.idx_bytes):
                return None
    logs = {name: record[name] for name in (LOG_FILE, NEAR_FILE) if name in record}
    intact = (_intact(place / name, log["bytes"], [log["xxh3"]], log["bytes"])
              for name, log in logs.items())  # fmt: skip
    return record if all(intact) else None


def add_new(known: dict[int, dict], folder: Place, job: Job, end: int) -> None:
    """Add to `known` the records of the splits before `end` that were done meanwhile, anywhere."""
    for number in range(end):
        if number not in known and (record := record_of(folder, job, number, check=False)):
            known[number] = record


def shards_of(record: dict) -> dict[str, tuple[Shard, ...]]:
    """The shards of a record, relative to the split's folder."""
    return {side: tuple(map(Shard.parse, record["shards"][side])) for side in SPLITS}


def _all_there(place: Place, record: dict) -> bool:
    """Whether the files of a record are in a bucket, with their sizes."""
    wanted = {name: record[name]["bytes"] for name in (LOG_FILE, NEAR_FILE) if name in record}
    for shards in shards_of(record).values():
        wanted |= {shard.file: shard.bytes for shard in shards}
        wanted |= {shard.idx_file: shard.idx_bytes for shard in shards}
    there = place.sizes()
    for side in SPLITS:
        there |= {f"{side}/{name}": size for name, size in (place / side).sizes().items()}
    return wanted.items() <= there.items()


def _intact(path: Path, size: int, blocks=None, block_bytes: int = BLOCK_BYTES) -> bool:
    """Whether a file is there with this size and, when given, the xxh3_64 of its blocks."""
    try:
        if path.stat().st_size != size:
            return False
        with open(path, "rb") as file:
            return blocks is None or all(
                xxhash.xxh3_64_hexdigest(file.read(block_bytes)) == block for block in blocks
            )
    except FileNotFoundError:
        return False
