"""A folder of a host that is copied to one place while a job runs, and back before it starts.

So SageMaker keeps checkpoints: every host has a folder of its own, and S3 has what all of them
wrote. Here a folder of this machine stands for S3. Files that a host deletes stay there.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

PAUSE = 0.5  # seconds between looks for what is new


class Copied:
    """``hosts``' folders and their ``store``: inside, what hosts write is copied there."""

    def __init__(self, hosts: Sequence[Path], store: Path):
        self.hosts, self.store = hosts, store
        self._seen: dict[Path, tuple[int, int]] = {}
        self._ended = threading.Event()
        self._copier = threading.Thread(target=self._work, daemon=True, name="copied")

    def __enter__(self) -> Copied:
        self.store.mkdir(parents=True, exist_ok=True)
        for host in self.hosts:
            shutil.copytree(self.store, host, dirs_exist_ok=True)
            self._seen |= {path: _looks(path) for path in _files(host)}
        self._copier.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._copier.join()
        self.copy()

    def copy(self) -> None:
        """What hosts have written since."""
        for host in self.hosts:
            for path in _files(host):
                self._copy_one(path, self.store / path.relative_to(host))

    def _copy_one(self, path: Path, target: Path) -> None:
        try:
            looks = _looks(path)
            if self._seen.get(path) == looks:
                return
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f"{target.name}.copied")
            shutil.copyfile(path, partial)
            partial.replace(target)
            self._seen[path] = looks
        except FileNotFoundError:
            pass  # its host has deleted it meanwhile

    def _work(self) -> None:
        while not self._ended.wait(PAUSE):
            self.copy()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _looks(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
