import errno
import os
import socket

import pytest

from nearlinear.storage import folders
from nearlinear.storage.folders import abandoned, exchange, making, settle_all


def test_a_folder_gets_its_name_when_all_of_it_is_there(tmp_path):
    out = tmp_path / "below/out"
    with making(out) as work:
        (work / "a").write_text("1")
        assert not out.exists() and work.parent == out.parent
    assert (out / "a").read_text() == "1" and list(out.parent.iterdir()) == [out]


def test_a_block_that_raises_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), making(tmp_path / "out") as work:
        (work / "a").write_text("1")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_replaced(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(OSError) as caught, making(out) as work:
        (work / "a").write_text("1")
        out.mkdir()
        (out / "mine").write_text("2")
    assert caught.value.errno in (errno.ENOTEMPTY, errno.EEXIST)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]
    (out / "mine").unlink()
    with making(out) as work:
        (work / "a").write_text("1")
    assert (out / "a").is_file()


def test_what_dead_processes_of_this_host_made_is_abandoned(tmp_path):
    child, host = os.fork(), socket.gethostname()
    if not child:
        with making(tmp_path / "of a child"):
            os._exit(0)
    os.waitpid(child, 0)
    for name in (f"a.{host}-{os.getppid()}.tmp", "a.another-1.tmp", "own.tmp", f"a.{host}-1"):
        (tmp_path / name).mkdir()
    with making(tmp_path / "mine"):
        found = abandoned(tmp_path)
    assert found == [tmp_path / f"of a child.{host}-{child}.tmp"]
    assert not abandoned(tmp_path / "none")


def test_every_file_and_folder_is_told_to_the_disk(tmp_path, monkeypatch):
    for name in ("a", "b/c", "b/d/e"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    told = set()
    monkeypatch.setattr(os, "fsync", lambda number: told.add(os.fstat(number).st_ino))
    settle_all(tmp_path)
    assert told == {path.stat().st_ino for path in (tmp_path, *tmp_path.rglob("*"))}

    def full(number):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="broken"):
        settle_all(tmp_path)


def test_two_names_change_what_they_name(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    if not exchange(one, one):
        pytest.skip("this file system cannot")
    assert not exchange(one, other)
    other.mkdir()
    (other / "a").write_text("1")
    assert exchange(one, other)
    assert (one / "a").is_file() and not list(other.iterdir())


def test_where_names_cannot_be_exchanged_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.ctypes, "CDLL", lambda name: object())
    assert not exchange(tmp_path, tmp_path)
