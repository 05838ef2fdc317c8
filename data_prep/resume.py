"""Find the work of an earlier preparation that can be reused.

A finished split has a record of its files. Work is reused if settings and text are the same. Files
are compared by size and time, and by their text if the times differ; a Hub dataset by its
revision; botocore by its version; a source of this process alone by its text, which is read again.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from data_prep.documents import has_same_text
from data_prep.plan import PLAN_FILE, PreparationPlan
from data_prep.storage_paths import absolute_path, read_json
from nearlinear.data.format import (
    BLOCK_BYTES,
    FORMAT_VERSION,
    SPLITS,
    Manifest,
    Shard,
    encode_with_hash,
    has_own_hash,
)
from nearlinear.errors import DataError
from nearlinear.own_hash import NO_HASH
from nearlinear.storage import StoragePath

LOG_FILE = "documents.log"
SIGNATURES_FILE = "near.signatures"
DROPPED_FILE = "dropped.log"
FIELDS_FILE = "fields.parquet"
_SIDE_FILES = (LOG_FILE, SIGNATURES_FILE, DROPPED_FILE, FIELDS_FILE)
RECORD_FILE = "record.json"
HISTORY_FILE = "preparation.json"


def split_folder(folder: StoragePath, number: int) -> StoragePath:
    """Return the folder of a finished split inside the folder of an unfinished output."""
    return folder / f"splits/{number:05d}"


def finished_splits(folder: StoragePath) -> Iterator[StoragePath]:
    """Yield the folders of the splits that have a record, in order."""
    for path in sorted((folder / "splits").subfolders(), key=str):
        if not path.name.endswith(".tmp") and RECORD_FILE in path.file_sizes():
            yield path


def read_record(
    folder: StoragePath, plan: PreparationPlan, number: int, check_files: bool = True
) -> dict[str, Any] | None:
    """Return the record of a finished split, or None if the split must be processed.

    With `check_files`, the files on a disk are compared by content. In a bucket only sizes are
    compared: an object is intact or absent.
    """
    split = split_folder(folder, number)
    record = read_json(split / RECORD_FILE)
    if record is None or record["job"] != plan.digest:
        return None
    if not check_files:
        return record
    if split.path is None:
        return record if _has_all_objects(split, record) else None
    path = split.path
    for shards in record_shards(record).values():
        for shard in shards:
            if not _is_intact(path / shard.file, shard.bytes, shard.blocks):
                return None
            if not _is_intact(path / shard.idx_file, shard.idx_bytes):
                return None
    logs = {name: record[name] for name in _SIDE_FILES if name in record}
    intact = (_is_intact(path / name, log["bytes"], [log["xxh3"]], log["bytes"])
              for name, log in logs.items())  # fmt: skip
    return record if all(intact) else None


def add_new_records(
    known: dict[int, dict[str, Any]], folder: StoragePath, plan: PreparationPlan, end: int
) -> None:
    """Add the records of the splits before `end` that other processes have finished."""
    for number in range(end):
        if number not in known:
            if record := read_record(folder, plan, number, check_files=False):
                known[number] = record


def record_shards(record: dict[str, Any]) -> dict[str, tuple[Shard, ...]]:
    """Return the train and val shards of a record, with paths relative to the split's folder."""
    return {subset: tuple(map(Shard.parse, record["shards"][subset])) for subset in SPLITS}


def write_history(folder: StoragePath, history: dict[str, Any]) -> None:
    """Write the CPU seconds by stage and the inputs of a dataset."""
    (folder / HISTORY_FILE).put(encode_with_hash({"sha256": NO_HASH, **history}))


def read_history(folder: str | Path | StoragePath) -> dict[str, Any]:
    """Return the document of `write_history`; empty if it is missing or damaged."""
    return read_json(absolute_path(folder) / HISTORY_FILE) or {}


def check_history(folder: str | Path | StoragePath) -> None:
    """Raise `DataError` if the history of a dataset was changed since it was written."""
    path = absolute_path(folder) / HISTORY_FILE
    try:
        raw = path.read()
    except FileNotFoundError:
        return
    if not has_own_hash(raw) and b'"cpu_seconds"' not in raw[:20]:  # as in older versions
        raise DataError(f"{path} is damaged: delete it; it holds the times of the preparation only")


def _has_all_objects(split: StoragePath, record: dict[str, Any]) -> bool:
    wanted = {name: record[name]["bytes"] for name in _SIDE_FILES if name in record}
    for shards in record_shards(record).values():
        wanted |= {shard.file: shard.bytes for shard in shards}
        wanted |= {shard.idx_file: shard.idx_bytes for shard in shards}
    found = split.file_sizes()
    for subset in SPLITS:
        sizes = (split / subset).file_sizes()
        found |= {f"{subset}/{name}": size for name, size in sizes.items()}
    return wanted.items() <= found.items()


def _is_intact(
    path: Path, size: int, blocks: Iterable[str] | None = None, block_bytes: int = BLOCK_BYTES
) -> bool:
    """Compare a file's size and, if given, the xxh3_64 of its blocks."""
    try:
        if path.stat().st_size != size:
            return False
        with open(path, "rb") as file:
            return blocks is None or all(
                xxhash.xxh3_64_hexdigest(file.read(block_bytes)) == block for block in blocks
            )
    except FileNotFoundError:
        return False


def describe_difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Describe the differing settings in one line: `seed 0 -> 1, ...`. Empty if equal."""
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return ", ".join(f"{key} {_shorten(old.get(key))} -> {_shorten(new.get(key))}" for key in keys)


def suggest_revision(old: dict[str, Any], plan: PreparationPlan) -> str:
    """Suggest `--revision` if the old settings name another commit of a Hub dataset.

    The text is placed before the other remedies; it is empty if there is no such commit.
    """
    commit, name = old.get("revision"), plan.settings.get("dataset")
    if not commit or commit == plan.settings.get("revision") or not name or Path(name).is_dir():
        return ""
    return f"pass --revision {commit} to continue with that commit, or "


def find_partial_mismatch(partial: StoragePath, plan: PreparationPlan) -> str:
    """Describe the difference between the plan and an unfinished output. Empty if none."""
    old = read_json(partial / PLAN_FILE)
    if old is None:
        return f"{PLAN_FILE} missing"
    if changed := describe_difference({"format": old.get("format")}, {"format": FORMAT_VERSION}):
        return changed
    if changed := describe_difference(old["settings"], plan.settings):
        return changed
    if not plan.inputs and plan.source.revision is None:
        if changed := describe_difference(old["provenance"], plan.source.provenance):
            return changed
    sizes, now = [file[1] for file in old["inputs"]], [file.bytes for file in plan.inputs]
    if sizes != now:
        return f"input {sum(sizes)} -> {sum(now)} bytes"
    if old["splits"] != [list(split) for split in plan.splits]:
        return "different input splits"
    if old["inputs"] != [list(file) for file in plan.inputs] or _is_known_by_text(plan):
        for path in finished_splits(partial):
            record = read_json(path / RECORD_FILE)
            if record and not has_same_text(
                plan, record["split"], record["documents"], record["text"]
            ):
                return f"different text in input split {record['split']}"
    return ""


def find_input_mismatch(manifest: Manifest, out: StoragePath, plan: PreparationPlan) -> str:
    """Describe the difference between a dataset's input and the plan's. Empty if none.

    Files with the same name, size and time are not read again.
    """
    if not plan.inputs and not _is_known_by_text(plan):
        return ""
    before = [file["bytes"] for file in manifest.plan["inputs"]]
    if before != [file.bytes for file in plan.inputs]:
        return f"input {sum(before)} -> {sum(file.bytes for file in plan.inputs)} bytes"
    if plan.inputs and read_history(out).get("inputs") == [list(file) for file in plan.inputs]:
        return ""
    splits = manifest.plan["splits"]
    now = plan.splits[: len(splits)] if _may_have_ended_early(plan, splits) else plan.splits
    if [split[:3] for split in splits] != [list(split[:3]) for split in now]:
        return "different input splits"
    for number, (*_, count, digest) in enumerate(splits):
        if not has_same_text(plan, number, count, digest):
            return f"different text in input split {number}"
    return ""


def unverified_text_note(plan: PreparationPlan) -> str:
    """Return a note if the text cannot be compared with that of an earlier run, else ""."""
    if plan.source.revision is None or plan.settings["revision"] or _is_known_by_text(plan):
        return ""
    return (
        f"note: the text of {plan.source.name} was not compared with the text read before, because "
        "the Hugging Face Hub did not return its revision; --overwrite prepares it again"
    )


def _may_have_ended_early(plan: PreparationPlan, splits: list[list[Any]]) -> bool:
    """Return True if a limit may have ended a dataset before the end of its input."""
    limit = plan.settings["max_documents"]
    if plan.settings["max_tokens"] is not None:
        return True
    return limit is not None and sum(count for *_, count, _ in splits) >= limit


def _is_known_by_text(plan: PreparationPlan) -> bool:
    return plan.source.spec is None and not plan.settings.get("revision")


def _shorten(value: object) -> str:
    text = str(value)
    return text[:12] + "..." if len(text) > 40 else text
