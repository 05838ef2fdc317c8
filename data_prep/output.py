"""The output folder: built beside its place and renamed into it, so it is complete or absent.

In a bucket, where nothing can be renamed, it is complete when its `index.json` is there. Work
happens in `OUT.partial` under a lock that dies with its processes. What a stopped preparation
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

from data_prep import places
from data_prep.job import JOB_FILE, Job, read_json
from data_prep.merge import history, merge
from data_prep.places import Place
from data_prep.work import RECORD_FILE, same_text, sync_folder
from nearlinear.data.format import FORMAT_NAME, MANIFEST_FILE, Manifest, verify
from nearlinear.errors import DataError

_LOCK_FILE = "lock"
_SECONDS_FOR_LOCK = 3.0


def existing(out: Place, job: Job, overwrite: bool) -> Manifest | None:
    """The manifest of an intact dataset at `out` made of exactly this job; None to build one.

    Of one in a bucket the sizes are compared. Raises `DataError` for a dataset of other settings or
    another input, a damaged one, and (even with `overwrite`) for a folder of anything else.
    """
    if not out.exists() or (out.path and out.path.is_dir() and not any(out.path.iterdir())):
        return None
    if not _looks_like_ours(out / MANIFEST_FILE):
        if out.path is None and JOB_FILE in _partial(out).sizes():
            return None
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
    return verify(out, full=out.path is not None)


def difference(old: dict, new: dict) -> str:
    """What differs between two settings, in one line: `seed 0 -> 1, ...`."""
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return ", ".join(f"{key} {_short(old.get(key))} -> {_short(new.get(key))}" for key in keys)


@contextmanager
def staging(
    out: str | Path | Place, job: Job, overwrite: bool, keep: bool = False
) -> Iterator[tuple[Place, int | None]]:
    """A folder to do `job` in, and the descriptor of its lock; publish it with `publish`.

    What a stopped preparation of the same job left is in it. Left without a finished split it is
    removed, unless `keep`: others work in it. Raises `DataError` when another process is building
    the same `out`, or when what is left is of another job and is not to be overwritten. A bucket
    has no locks: two that do the same job there write the same bytes.
    """
    out = places.at(out)
    partial = _partial(out)
    partial.make()
    with _lock(partial, out) as lock:
        try:
            done = any(_done(partial))
            changed = _difference_of_left(partial, job) if done else ""
            if changed and not overwrite:
                raise DataError(
                    f"{partial} holds an unfinished preparation with other settings ({changed}): "
                    "pass --overwrite to start anew, or choose another --out"
                )
            if changed or not done:
                _clear(partial)
            (partial / "splits").make()
            if partial.path:
                for stale in partial.path.glob("splits/*.tmp"):
                    shutil.rmtree(stale, ignore_errors=True)
            job.save(partial)
            yield partial, lock
        finally:
            if not keep and partial.exists() and not any(_done(partial)):
                partial.clear()


def finish(job: Job, partial: Place, records: list[dict], out: str | Path | Place) -> Manifest:
    """Merge the finished splits of a staging folder, put the dataset in its place, clean up."""
    out = places.at(out)
    if out.path is None:
        manifest = merge(job, partial, records, out)
    else:
        manifest = merge(job, partial, records, partial / "dataset")
        _rename((partial / "dataset").path, out.path)
    discard(out)
    return manifest


def discard(out: str | Path | Place) -> None:
    """Remove what an unfinished preparation of `out` left."""
    _partial(places.at(out)).clear()


def _partial(out: Place) -> Place:
    return places.beside(out, ".partial")


def _rename(dataset: Path, out: Path) -> None:
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.rename(out, old)
    os.rename(dataset, out)
    sync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _lock(partial: Place, out: Place) -> Iterator[int | None]:
    if partial.path is None:
        yield None
        return
    with open(partial.path / _LOCK_FILE, "w") as lock:
        _take(lock, out)
        yield lock.fileno()


def _take(lock, out: Place) -> None:
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


def _done(partial: Place) -> Iterator[Place]:
    """The finished splits, in order."""
    for place in sorted((partial / "splits").folders(), key=str):
        if not place.name.endswith(".tmp") and RECORD_FILE in place.sizes():
            yield place


def _clear(partial: Place) -> None:
    if partial.path is None:
        partial.clear()
        return
    for stale in partial.path.iterdir():
        if stale.name != _LOCK_FILE:
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()


def _difference_of_left(partial: Place, job: Job) -> str:
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
        for place in _done(partial):
            record = read_json(place / RECORD_FILE)
            if record and not same_text(job, record["split"], record["documents"], record["text"]):
                return f"input, the text of split {record['split']} is another"
    return ""


def _other_input(manifest: Manifest, out: Place, job: Job) -> str:
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


def _looks_like_ours(manifest_file: Place) -> bool:
    """Whether replacing the folder can be allowed: even a damaged manifest names its format."""
    try:
        return FORMAT_NAME.encode() in b"".join(manifest_file.stream(0, 200))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def _short(value) -> str:
    text = str(value)
    return text[:12] + "..." if len(text) > 40 else text
