"""The output folder: built beside its final name and renamed, so it is complete or absent.

A bucket has no rename; a dataset there is complete when its `index.json` exists. Work happens in
`OUT.partial`, under a lock that ends with its processes, or under a mark while jobs wait in a
cluster's queue. A stopped preparation leaves its plan and its finished splits there. The next
preparation with the same settings resumes from them; one with other settings is refused.

The lock is a file in the folder, locked with flock. The kernel releases it when the last process
that has it open ends, in whatever way. The holder may delete the folder with the lock file; a
process that waited for the deleted file then opens a new one.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from data_prep.merge import merge
from data_prep.plan import PLAN_FILE, PreparationPlan
from data_prep.resume import (
    describe_difference,
    find_input_mismatch,
    find_partial_mismatch,
    finished_splits,
    suggest_revision,
)
from data_prep.storage_paths import absolute_path, append_to_name, read_json, write_json
from nearlinear.data.format import FORMAT_NAME, MANIFEST_FILE, Manifest, verify
from nearlinear.errors import DataError
from nearlinear.storage import StoragePath
from nearlinear.storage.local import abandoned_directories, exchange_paths, sync_directory

_MARK_FILE = "submitted.json"
_REPLACED = "replaced"
"""Name of the previous dataset while the new one takes its place."""

LOCK_FILE = "lock"
_LOCK_TIMEOUT = 3.0  # seconds; workers may end later than the process that started them


class LockBusyError(DataError):
    """Raised when another process holds the lock."""


class Lock:
    """An open and locked file."""

    def __init__(self, path: Path, file: IO[str]):
        self._path, self._file = path, file

    @property
    def descriptor(self) -> int:
        """File descriptor; a child process that inherits it holds the lock too."""
        return self._file.fileno()

    def is_valid(self) -> bool:
        """Return True if the file still has its name. A deleted file locks nothing."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except FileNotFoundError:
            return False


def find_existing(out: StoragePath, plan: PreparationPlan, overwrite: bool) -> Manifest | None:
    """Verify and return the dataset at `out` if it was made by this plan, or None to prepare it.

    A dataset in a bucket is verified by sizes only.

    Raises:
        DataError: The dataset has other settings or input, or is damaged (unless `overwrite`), or
            `out` holds anything else (even with `overwrite`).
    """
    _restore_replaced_under_lock(out)
    if not out.exists() or (out.path and out.path.is_dir() and not any(out.path.iterdir())):
        return None
    if not _is_dataset(out / MANIFEST_FILE):
        if out.path is None and PLAN_FILE in _partial_folder(out).file_sizes():
            return None
        raise DataError(
            f"{out} exists and is not a folder of token shards: choose another --out, or remove it"
        )
    if overwrite:
        return None
    manifest = Manifest.read(out)
    changed = describe_difference(manifest.settings, plan.settings) or find_input_mismatch(
        manifest, out, plan
    )
    if changed:
        raise DataError(
            f"{out} was prepared with other settings ({changed}): "
            f"{suggest_revision(manifest.settings, plan)}"
            "pass --overwrite to replace it, or choose another --out"
        )
    return verify(out, full=out.path is not None)


@contextmanager
def staging(
    out: str | Path | StoragePath, plan: PreparationPlan, overwrite: bool
) -> Iterator[tuple[StoragePath, Lock | None]]:
    """Yield the folder to prepare `out` in, and its lock. Call `publish` at the end.

    The folder holds the finished splits of a stopped preparation with the same plan. A local folder
    without a finished split is removed at the end. A bucket has no locks: two preparations with the
    same plan write the same bytes there, and neither removes the other's files.

    Raises:
        DataError: Another process or submitted jobs prepare `out`, or the folder holds splits of
            another plan (unless `overwrite`).
    """
    out = absolute_path(out)
    partial = _partial_folder(out)
    with acquire_lock(partial, out) as held:
        _restore_replaced(out)
        try:
            if not overwrite:
                _check_not_submitted(partial, out)
            has_splits = any(finished_splits(partial))
            has_plan = has_splits or PLAN_FILE in partial.file_sizes()
            changed = find_partial_mismatch(partial, plan) if has_plan else ""
            if has_splits and changed and not overwrite:
                old = read_json(partial / PLAN_FILE) or {"settings": {}}
                raise DataError(
                    f"{partial} holds an unfinished preparation with other settings ({changed}): "
                    f"{suggest_revision(old['settings'], plan)}"
                    "pass --overwrite to start again, or choose another --out"
                )
            if changed or (held and not has_splits):
                clear_folder(partial)
            if _MARK_FILE in partial.file_sizes():
                (partial / _MARK_FILE).remove()
            (partial / "splits").mkdir()
            if partial.path:
                for stale in abandoned_directories(partial.path / "splits"):
                    shutil.rmtree(stale, ignore_errors=True)
            plan.save(partial)
            yield partial, held
        finally:
            if held and held.is_valid() and not _is_worth_keeping(partial):
                remove_folder(partial)


@contextmanager
def submitting(out: StoragePath, plan: PreparationPlan, overwrite: bool) -> Iterator[StoragePath]:
    """Yield a folder for jobs of a cluster's queue, which run while nobody holds the lock.

    The folder is marked, so that other preparations are refused until `merging`. The mark is
    removed if the block raises.
    """
    with staging(out, plan, overwrite) as (partial, _):
        write_json(partial / _MARK_FILE, {"time": time.strftime("%Y-%m-%d %H:%M:%S")})
    try:
        yield partial
    except BaseException:
        with acquire_lock(partial, out):
            _remove_mark(partial)
        raise


@contextmanager
def merging(out: str | Path | StoragePath) -> Iterator[None]:
    """Hold the lock of a submitted preparation while it is merged; remove its mark at the end."""
    partial = _partial_folder(absolute_path(out))
    with acquire_lock(partial, absolute_path(out)) as held:
        try:
            yield
        finally:
            if held is None or held.is_valid():
                _remove_mark(partial)


def publish(
    plan: PreparationPlan,
    partial: StoragePath,
    records: list[dict[str, Any]],
    out: str | Path | StoragePath,
) -> Manifest:
    """Merge the finished splits of a locked folder into a dataset at `out`, then clean up."""
    out = absolute_path(out)
    if out.path is None:
        manifest = merge(plan, partial, records, out)
    else:
        dataset = partial / "dataset"
        manifest = merge(plan, partial, records, dataset)
        assert dataset.path is not None, "a local output is prepared locally"
        _rename_dataset(dataset.path, out)
    remove_folder(partial)
    return manifest


def clean_up(out: StoragePath, plan: PreparationPlan) -> None:
    """Remove the unfinished preparation of a finished `out`, unless another process uses it.

    Finished splits of other settings are kept for their resumption. In a bucket, where other
    processes cannot be detected, only the leftovers of this plan are removed.
    """
    partial = _partial_folder(out)
    if not partial.exists():
        return
    with suppress(LockBusyError), acquire_lock(partial, out, wait=False) as held:
        left = read_json(partial / PLAN_FILE) or {"settings": plan.settings}
        unused = held and not any(finished_splits(partial))
        if left["settings"] == plan.settings or unused:
            if _MARK_FILE not in partial.file_sizes():
                remove_folder(partial)


def logs_folder(out: str | Path | StoragePath) -> Path:
    """Return the folder of an engine's logs, OUT.logs.

    For an output in a bucket, it is a folder of that name in the working directory.
    """
    logs = append_to_name(absolute_path(out), ".logs")
    return logs.path or Path(logs.name).absolute()


def _partial_folder(out: StoragePath) -> StoragePath:
    return append_to_name(out, ".partial")


def _check_not_submitted(partial: StoragePath, out: StoragePath) -> None:
    mark = read_json(partial / _MARK_FILE)
    if mark is not None:
        raise DataError(
            f"{out} was submitted to a cluster at {mark['time']} and is not merged yet: wait for "
            "its jobs. If no job is running or queued, pass --overwrite to resume from their "
            "finished splits"
        )


def _remove_mark(partial: StoragePath) -> None:
    (partial / _MARK_FILE).remove()
    if not _is_worth_keeping(partial):
        remove_folder(partial)


def _is_worth_keeping(partial: StoragePath) -> bool:
    """Return True if a folder holds finished splits or a mark of submitted jobs."""
    return _MARK_FILE in partial.file_sizes() or any(finished_splits(partial))


def _rename_dataset(dataset: Path, out: StoragePath) -> None:
    """Rename a dataset to `out`; the previous dataset moves to the old folder of the new one."""
    assert out.path is not None
    if not (out.path.exists() and exchange_paths(dataset, out.path)):
        if out.path.exists():
            os.rename(out.path, dataset.with_name(_REPLACED))
        try:
            os.rename(dataset, out.path)
        finally:
            _restore_replaced(out)
    sync_directory(out.path.parent)


def _restore_replaced(out: StoragePath) -> None:
    """Restore the previous dataset if a preparation stopped between two renames."""
    replaced = (_partial_folder(out) / _REPLACED).path
    if out.path and replaced and replaced.exists() and not out.path.exists():
        os.rename(replaced, out.path)


def _restore_replaced_under_lock(out: StoragePath) -> None:
    partial = _partial_folder(out)
    replaced = (partial / _REPLACED).path
    if replaced and replaced.exists():
        with acquire_lock(partial, out):
            _restore_replaced(out)


def _is_dataset(manifest_file: StoragePath) -> bool:
    """Return True if the folder may be replaced: even a damaged manifest names its format."""
    try:
        return FORMAT_NAME.encode() in b"".join(manifest_file.stream(0, 200))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


@contextmanager
def acquire_lock(folder: StoragePath, out: StoragePath, wait: bool = True) -> Iterator[Lock | None]:
    """Create `folder`, where `out` is prepared, and hold its lock. Yields None in a bucket.

    Raises:
        LockBusyError: Another process holds the lock, with `wait` for longer than the timeout.
        DataError: The file system does not support locks.
    """
    if folder.path is None:
        yield None
        return
    path = folder.path / LOCK_FILE
    deadline = time.monotonic() + _LOCK_TIMEOUT * wait
    while True:
        folder.mkdir()
        try:
            file = open(path, "w")
        except FileNotFoundError:  # removed by another process
            continue
        with file:
            lock = Lock(path, file)
            if _try_lock(file, folder.path) and lock.is_valid():
                yield lock
                return
        if time.monotonic() > deadline:
            raise LockBusyError(
                f"another process is preparing {out}: wait for it, or choose another --out"
            )
        time.sleep(0.05)


def remove_folder(folder: StoragePath) -> None:
    """Remove a folder with its lock, which the caller holds. The lock file goes last."""
    clear_folder(folder)
    if folder.path is not None:
        (folder.path / LOCK_FILE).unlink(missing_ok=True)
        with suppress(OSError):  # the next process may already use the folder
            folder.path.rmdir()


def clear_folder(folder: StoragePath) -> None:
    """Remove everything but the lock from a folder whose lock the caller holds."""
    if folder.path is None:
        folder.rmtree()
        return
    for stale in folder.path.iterdir():
        if stale.is_dir() and not stale.is_symlink():
            shutil.rmtree(stale, ignore_errors=True)
        elif stale.name != LOCK_FILE:
            stale.unlink(missing_ok=True)


def _try_lock(file: IO[str], folder: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _remove_new_folder(folder)
        raise DataError(
            f"{folder} is on a file system without locks ({error.strerror}): mount it with locks "
            "(Lustre: -o flock; NFS: without nolock), or prepare on a local disk and copy the "
            "folder"
        ) from None
    return True


def _remove_new_folder(folder: Path) -> None:
    """Remove a folder that was created for the lock and holds nothing else."""
    if os.listdir(folder) == [LOCK_FILE]:
        with suppress(OSError):
            (folder / LOCK_FILE).unlink()
            folder.rmdir()
