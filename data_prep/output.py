"""The output folder: built beside its place and renamed into it, so it is complete or absent.

Work happens in `OUT.partial` under a lock that dies with its processes. What a stopped preparation
leaves there, its job and the splits that are done, is where the next one with the same settings
goes on; one with other settings is refused.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_prep.job import JOB_FILE, Job, read_json
from data_prep.merge import history
from data_prep.work import RECORD_FILE, same_text, sync_folder
from nearlinear.data.format import FORMAT_NAME, MANIFEST_FILE, Manifest, verify
from nearlinear.errors import DataError

_LOCK_FILE = "lock"
_SECONDS_FOR_LOCK = 3.0


def existing(out: Path, job: Job, overwrite: bool) -> Manifest | None:
    """The manifest of an intact dataset at `out` made of exactly this job; None to build one.

    Raises `DataError` for a dataset of other settings or another input, a damaged one, and (even
    with `overwrite`) for a folder of anything else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not _looks_like_ours(out / MANIFEST_FILE):
        raise DataError(
            f"{out} exists and is not a folder of token shards: choose another --out, or remove it"
        )
    if overwrite:
        return None
    manifest = Manifest.read(out)
    changed = difference(manifest.settings, job.settings) or _other_input(manifest, out, job)
    if changed:
        raise DataError(
            f"{out} was prepared with other settings ({changed}): "
            "pass --overwrite to replace it, or choose another --out"
        )
    return verify(out)


def difference(old: dict, new: dict) -> str:
    """What differs between two settings, in one line: `seed 0 -> 1, ...`."""
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return ", ".join(f"{key} {_short(old.get(key))} -> {_short(new.get(key))}" for key in keys)


@contextmanager
def staging(out: Path, job: Job, overwrite: bool, keep: bool = False) -> Iterator[tuple[Path, int]]:
    """A folder to do `job` in, and the descriptor of its lock; publish it with `publish`.

    What a stopped preparation of the same job left is in it. Left without a finished split it is
    removed, unless `keep`: others work in it. Raises `DataError` when another process is building
    the same `out`, or when what is left is of another job and is not to be overwritten.
    """
    out = Path(os.path.abspath(out))
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with open(partial / _LOCK_FILE, "w") as lock:
        _take(lock, out)
        try:
            changed = _difference_of_left(partial, job) if any(_done(partial)) else ""
            if changed and not overwrite:
                raise DataError(
                    f"{partial} holds an unfinished preparation with other settings ({changed}): "
                    "pass --overwrite to start anew, or choose another --out"
                )
            if changed or not any(_done(partial)):
                _clear(partial)
            (partial / "splits").mkdir(exist_ok=True)
            for stale in [*partial.glob("splits/*.tmp"), partial / "settled"]:
                shutil.rmtree(stale, ignore_errors=True)
            job.save(partial)
            yield partial, lock.fileno()
        finally:
            if not keep and partial.exists() and not any(_done(partial)):
                shutil.rmtree(partial, ignore_errors=True)


def publish(partial: Path, out: Path) -> None:
    """Put the finished dataset of a staging folder in its place, and remove the folder."""
    out = Path(os.path.abspath(out))
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.rename(out, old)
    os.rename(partial / "dataset", out)
    sync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)
    discard(out)


def discard(out: Path) -> None:
    """Remove what an unfinished preparation of `out` left."""
    out = Path(os.path.abspath(out))
    shutil.rmtree(out.with_name(out.name + ".partial"), ignore_errors=True)


def _take(lock, out: Path) -> None:
    """Lock, with patience for workers that are ending because their parent did."""
    deadline = time.monotonic() + _SECONDS_FOR_LOCK
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                raise DataError(
                    f"another process is preparing {out}: wait for it, or choose another --out"
                ) from None
            time.sleep(0.05)


def _done(partial: Path) -> Iterator[Path]:
    return (path for path in partial.glob("splits/*") if path.suffix != ".tmp")


def _clear(partial: Path) -> None:
    for stale in partial.iterdir():
        if stale.name != _LOCK_FILE:
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()


def _difference_of_left(partial: Path, job: Job) -> str:
    """How the job that left splits in `partial`, or its input, differs; empty if it does not."""
    old = read_json(partial / JOB_FILE)
    if old is None:
        return f"{JOB_FILE} missing"
    if changed := difference(old["settings"], job.settings):
        return changed
    sizes, now = [file[1] for file in old["inputs"]], [file.bytes for file in job.inputs]
    if sizes != now:
        return f"input {sum(sizes)} -> {sum(now)} bytes"
    if old["splits"] != [list(split) for split in job.splits]:
        return "input of other pieces"
    if old["inputs"] != [list(file) for file in job.inputs]:
        for path in sorted(_done(partial)):
            record = read_json(path / RECORD_FILE)
            if record and not same_text(job, record["split"], record["documents"], record["text"]):
                return f"input, the text of split {record['split']} is another"
    return ""


def _other_input(manifest: Manifest, out: Path, job: Job) -> str:
    """How the input of a finished dataset differs from the job's; empty when it does not.

    Files that are as they were, by name, size and time, are not read again.
    """
    if not job.inputs:
        return ""
    before = [file["bytes"] for file in manifest.plan["inputs"]]
    if before != [file.bytes for file in job.inputs]:
        return f"input {sum(before)} -> {sum(file.bytes for file in job.inputs)} bytes"
    if history(out).get("inputs") == [list(file) for file in job.inputs]:
        return ""
    for number, (*piece, count, text) in enumerate(manifest.plan["splits"]):
        if piece != list(job.splits[number][:3]) or not same_text(job, number, count, text):
            return f"input, the text of split {number} is another"
    return ""


def _looks_like_ours(manifest_file: Path) -> bool:
    """Whether replacing the folder can be allowed: even a damaged manifest names its format."""
    return manifest_file.is_file() and FORMAT_NAME.encode() in manifest_file.read_bytes()[:200]


def _short(value) -> str:
    text = str(value)
    return text[:12] + "..." if len(text) > 40 else text
