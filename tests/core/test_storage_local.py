"""Atomic directories: complete under their final name, or absent."""

import errno
import os
import socket

import pytest

from nearlinear.storage import local
from nearlinear.storage.local import (
    abandoned_directories,
    atomic_directory,
    exchange_paths,
    sync_tree,
)


def test_atomic_directory_appears_under_its_name_when_complete(tmp_path):
    out = tmp_path / "below/out"
    with atomic_directory(out) as work:
        (work / "a").write_text("1")
        assert not out.exists() and work.parent == out.parent
    assert (out / "a").read_text() == "1" and list(out.parent.iterdir()) == [out]


def test_atomic_directory_leaves_nothing_when_the_block_raises(tmp_path):
    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "out") as work:
        (work / "a").write_text("1")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_atomic_directory_does_not_replace_an_existing_one(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(OSError) as caught, atomic_directory(out) as work:
        (work / "a").write_text("1")
        out.mkdir()
        (out / "mine").write_text("2")
    assert caught.value.errno in (errno.ENOTEMPTY, errno.EEXIST)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]
    (out / "mine").unlink()
    with atomic_directory(out) as work:
        (work / "a").write_text("1")
    assert (out / "a").is_file()


def test_abandoned_directories_are_those_of_dead_processes_of_this_host(tmp_path):
    child, host = os.fork(), socket.gethostname()
    if not child:
        with atomic_directory(tmp_path / "of a child"):
            os._exit(0)
    os.waitpid(child, 0)
    for name in (f"a.{host}-{os.getppid()}.tmp", "a.another-1.tmp", "own.tmp", f"a.{host}-1"):
        (tmp_path / name).mkdir()
    with atomic_directory(tmp_path / "mine"):
        found = abandoned_directories(tmp_path)
    assert found == [tmp_path / f"of a child.{host}-{child}.tmp"]
    assert not abandoned_directories(tmp_path / "none")


def test_sync_tree_flushes_every_file_and_directory(tmp_path, monkeypatch):
    for name in ("a", "b/c", "b/d/e"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    sync_tree(tmp_path)
    assert synced == {path.stat().st_ino for path in (tmp_path, *tmp_path.rglob("*"))}

    def fail(descriptor):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="broken"):
        sync_tree(tmp_path)


def test_exchange_paths_swaps_two_directories(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    if not exchange_paths(first, first):
        pytest.skip("this file system does not support RENAME_EXCHANGE")
    assert not exchange_paths(first, second)
    second.mkdir()
    (second / "a").write_text("1")
    assert exchange_paths(first, second)
    assert (first / "a").is_file() and not list(second.iterdir())


def test_exchange_paths_returns_false_without_renameat2(tmp_path, monkeypatch):
    monkeypatch.setattr(local.ctypes, "CDLL", lambda name: object())
    assert not exchange_paths(tmp_path, tmp_path)
