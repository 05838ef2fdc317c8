"""The output folder: built beside its place and renamed into it, so it is complete or absent.

In a bucket, where nothing can be renamed, it is complete when its `index.json` is there. Work
happens in `OUT.partial` under a lock that dies with its processes, or, where jobs in a cluster's
queue do it, under a mark. What a stopped preparation leaves there, its job and the splits that are
done, is where the next one with the same settings goes on; one with other settings is refused.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data_prep import lock, places
from data_prep.compare import difference, other_input, other_left
from data_prep.job import JOB_FILE, Job, read_json, write_json
from data_prep.merge import merge
from data_prep.places import Place
from data_prep.records import finished
from nearlinear.data.format import FORMAT_NAME, MANIFEST_FILE, Manifest, verify
from nearlinear.errors import DataError
from nearlinear.storage.disk import settle
from nearlinear.storage.folders import abandoned, exchange

_MARK_FILE = "submitted.json"
_REPLACED = "replaced"
"""the dataset that was at OUT, while the new one gets its name"""


def existing(out: Place, job: Job, overwrite: bool) -> Manifest | None:
    """The manifest of an intact dataset at `out` made of exactly this job; None to build one.

    Of one in a bucket the sizes are compared. Raises `DataError` for a dataset of other settings or
    another input, a damaged one, and (even with `overwrite`) for a folder of anything else.
    """
    _put_back_under_lock(out)
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
    changed = difference(manifest.settings, job.settings) or other_input(manifest, out, job)
    if changed:
        raise DataError(
            f"{out} was prepared with other settings ({changed}): "
            "pass --overwrite to replace it, or choose another --out"
        )
    return verify(out, full=out.path is not None)


@contextmanager
def staging(
    out: str | Path | Place, job: Job, overwrite: bool
) -> Iterator[tuple[Place, lock.Lock | None]]:
    """A folder to do `job` in, and its lock; publish it with `finish`.

    What a stopped preparation of the same job left is in it. Left without a finished split it is
    removed. Raises `DataError` when another process or submitted jobs are building the same `out`,
    or when what is left is of another job and is not to be overwritten. A bucket has no locks: two
    that do the same job there write the same bytes.
    """
    out = places.at(out)
    partial = _partial(out)
    with lock.held(partial, out) as held:
        _put_back(out)
        try:
            if not overwrite:
                _refuse_marked(partial, out)
            done = any(finished(partial))
            changed = other_left(partial, job) if done else ""
            if changed and not overwrite:
                raise DataError(
                    f"{partial} holds an unfinished preparation with other settings ({changed}): "
                    "pass --overwrite to start anew, or choose another --out"
                )
            if changed or not done:
                lock.clear(partial)
            if _MARK_FILE in partial.sizes():
                (partial / _MARK_FILE).remove()
            (partial / "splits").make()
            if partial.path:
                for stale in abandoned(partial.path / "splits"):
                    shutil.rmtree(stale, ignore_errors=True)
            job.save(partial)
            yield partial, held
        finally:
            if (held is None or held.holds()) and not _of_use(partial):
                lock.remove(partial)


@contextmanager
def submitting(out: Place, job: Job, overwrite: bool) -> Iterator[Place]:
    """A folder where jobs of a cluster's queue are to do `job`, when nobody holds its lock.

    It is marked, so that others are refused until `merging`; a block that raises takes it back.
    """
    with staging(out, job, overwrite) as (partial, _):
        write_json(partial / _MARK_FILE, {"time": time.strftime("%Y-%m-%d %H:%M:%S")})
    try:
        yield partial
    except BaseException:
        with lock.held(partial, out):
            _unmark(partial)
        raise


@contextmanager
def merging(out: str | Path | Place) -> Iterator[None]:
    """The lock of the folder of submitted jobs, when they are over: then it is marked no more."""
    partial = _partial(places.at(out))
    with lock.held(partial, places.at(out)) as held:
        try:
            yield
        finally:
            if held is None or held.holds():
                _unmark(partial)


def finish(job: Job, partial: Place, records: list[dict], out: str | Path | Place) -> Manifest:
    """Merge the finished splits of a folder whose lock is held, put the dataset in its place,
    clean up.
    """
    out = places.at(out)
    if out.path is None:
        manifest = merge(job, partial, records, out)
    else:
        manifest = merge(job, partial, records, partial / "dataset")
        _publish((partial / "dataset").path, out)
    lock.remove(partial)
    return manifest


def tidy(out: Place, job: Job) -> None:
    """Remove what an unfinished preparation of a finished `out` left, unless others work in it.

    In a bucket, where that cannot be known, only what is left of the same job.
    """
    partial = _partial(out)
    if not partial.exists():
        return
    with suppress(lock.Busy), lock.held(partial, out, patient=False) as held:
        left = read_json(partial / JOB_FILE) or {"settings": job.settings}
        ours = held is not None or left["settings"] == job.settings
        if ours and _MARK_FILE not in partial.sizes():
            lock.remove(partial)


def _partial(out: Place) -> Place:
    return places.beside(out, ".partial")


def _refuse_marked(partial: Place, out: Place) -> None:
    mark = read_json(partial / _MARK_FILE)
    if mark is not None:
        raise DataError(
            f"{out} was submitted to a cluster at {mark['time']} and is not merged yet: wait for "
            "its jobs, or, when none of them runs or waits any more, pass --overwrite to go on "
            "with what they did"
        )


def _unmark(partial: Place) -> None:
    (partial / _MARK_FILE).remove()
    if not _of_use(partial):
        lock.remove(partial)


def _of_use(partial: Place) -> bool:
    """Whether something of a folder is still wanted when nobody holds its lock."""
    return _MARK_FILE in partial.sizes() or any(finished(partial))


def _publish(dataset: Path, out: Place) -> None:
    """Rename a dataset to `out`; what was there is left in the folder the dataset was in."""
    if not (out.path.exists() and exchange(dataset, out.path)):
        if out.path.exists():
            os.rename(out.path, dataset.with_name(_REPLACED))
        try:
            os.rename(dataset, out.path)
        finally:
            _put_back(out)
    settle(out.path.parent)


def _put_back(out: Place) -> None:
    """Where a preparation was stopped between two renames, let `out` be what it was."""
    replaced = _partial(out) / _REPLACED
    if out.path and replaced.path.exists() and not out.path.exists():
        os.rename(replaced.path, out.path)


def _put_back_under_lock(out: Place) -> None:
    partial = _partial(out)
    if out.path and (partial / _REPLACED).path.exists():
        with lock.held(partial, out):
            _put_back(out)


def _looks_like_ours(manifest_file: Place) -> bool:
    """Whether replacing the folder can be allowed: even a damaged manifest names its format."""
    try:
        return FORMAT_NAME.encode() in b"".join(manifest_file.stream(0, 200))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
