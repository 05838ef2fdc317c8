"""The output folder: built beside its place and renamed into it, so it is complete or absent.

Work happens in `OUT.partial`, which holds no index.json until everything else is on disk, under a
lock that dies with its process: what a killed preparation leaves behind is cleared by the next.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nearlinear.data.format import FORMAT_NAME, MANIFEST_FILE, Manifest, verify
from nearlinear.errors import DataError


def existing(out: Path, settings: dict, overwrite: bool) -> Manifest | None:
    """The manifest of an intact dataset at `out` with exactly `settings`; None to build one.

    Raises `DataError` for a dataset of other settings, a damaged one, and (even with `overwrite`)
    for a folder of anything else.
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
    if manifest.settings != settings:
        raise DataError(
            f"{out} was prepared with other settings ({difference(manifest.settings, settings)}): "
            "pass --overwrite to replace it, or choose another --out"
        )
    return verify(out)


def difference(old: dict, new: dict) -> str:
    """What differs between two settings, in one line: `seed 0 -> 1, ...`."""
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return ", ".join(f"{key} {_short(old.get(key))} -> {_short(new.get(key))}" for key in keys)


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A folder to build `out` in; renamed to `out` on success, removed on any error.

    Raises `DataError` when another process is building the same `out`.
    """
    out = Path(os.path.abspath(out))
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    lock_file = partial / "lock"
    with open(lock_file, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(
                f"another process is preparing {out}: wait for it, or choose another --out"
            ) from None
        try:
            for stale in partial.iterdir():
                if stale != lock_file:
                    shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
            yield partial
            lock_file.unlink()
            _publish(partial, out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _looks_like_ours(manifest_file: Path) -> bool:
    """Whether replacing the folder can be allowed: even a damaged manifest names its format."""
    return manifest_file.is_file() and FORMAT_NAME.encode() in manifest_file.read_bytes()[:200]


def _publish(partial: Path, out: Path) -> None:
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.rename(out, old)
    os.rename(partial, out)
    shutil.rmtree(old, ignore_errors=True)


def _short(value) -> str:
    text = str(value)
    return text[:12] + "..." if len(text) > 40 else text
