"""Nothing of what others do is removed: locks, marks of submitted jobs, folders in the making."""

import errno
import fcntl
import os
import socket

import pytest

import data_prep
from data_prep import lock, output
from data_prep.backends import Encoder
from data_prep.work import do_split
from nearlinear import storage
from nearlinear.data.format import verify
from nearlinear.errors import DataError
from tests.support.preparing import OPTIONS

pytestmark = pytest.mark.usefixtures("small_splits")


@pytest.fixture
def prepare(tmp_path, words, planned):
    """A function that prepares the text in a.jsonl at `out`."""
    planned()
    return lambda **more: data_prep.prepare(
        data_prep.sources.jsonl(tmp_path / "a.jsonl"),
        tmp_path / "out",
        tokenizer=words,
        **OPTIONS,
        **more,
    )


def test_another_process_is_waited_for(tmp_path, prepare, planned, monkeypatch):
    monkeypatch.setattr(lock, "_SECONDS_TO_WAIT", 0)
    with output.staging(tmp_path / "out", planned(), False):
        with pytest.raises(DataError, match="another process is preparing"):
            prepare()


def test_what_another_process_does_is_not_removed(tmp_path, prepare, planned):
    """A finished dataset is returned while another process prepares what is to replace it."""
    out, first = tmp_path / "out", prepare()
    with output.staging(out, planned(seed=5), True) as (partial, _):
        (partial.path / "splits/00000.other-1.tmp").mkdir()
        assert prepare() == first
        assert (partial.path / "splits/00000.other-1.tmp").is_dir()
        assert (partial.path / "job.json").is_file()
    out.with_name("out.partial").mkdir()
    assert prepare() == first and not out.with_name("out.partial").exists()


def test_a_lock_that_was_removed_locks_nothing(tmp_path, planned):
    """Who had it removes nothing of the next one's."""
    partial = tmp_path / "out.partial"
    with output.staging(tmp_path / "out", planned(), False) as (folder, held):
        assert held.holds()
        lock.remove(folder)
        assert not held.holds() and not partial.exists()
        with output.staging(tmp_path / "out", planned(), False) as (_, second):
            assert second.holds() and not held.holds()
            with pytest.raises(lock.Busy), lock.held(folder, folder, patient=False):
                pass
        assert not partial.exists()
        partial.mkdir()
        (partial / lock.LOCK_FILE).write_text("the next one's")
    assert (partial / lock.LOCK_FILE).read_text() == "the next one's"


def test_who_takes_a_lock_that_is_removed_takes_another(tmp_path, monkeypatch):
    """Who had it ends between the opening of the file and its lock."""
    folder, flock, files = storage.at(tmp_path / "out.partial"), fcntl.flock, []

    def late(file, how):
        files.append(file.fileno())
        if len(files) == 1:
            lock.remove(folder)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock.held(folder, folder) as held:
        assert held.holds() and len(files) == 2


def test_a_file_system_without_locks_is_said(tmp_path, prepare, monkeypatch):
    def none(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", none)
    with pytest.raises(DataError, match=r"system that has no locks \(No locks available\): mount"):
        prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_only_what_dead_processes_of_this_host_left_is_removed(tmp_path, planned):
    out, job, host = tmp_path / "out", planned(), socket.gethostname()
    splits = tmp_path / "out.partial/splits"
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(KeyboardInterrupt), output.staging(out, job, False) as (folder, _):
        do_split(job, 0, folder, Encoder(job.words, ("tokenizers",)))
        for name in (f"{host}-{child}", f"{host}-{os.getppid()}", "another-1"):
            (splits / f"00001.{name}.tmp").mkdir()
        raise KeyboardInterrupt
    with output.staging(out, job, False):
        left = {path.name for path in splits.iterdir()}
    assert left == {"00000", f"00001.{host}-{os.getppid()}.tmp", "00001.another-1.tmp"}


def test_what_was_submitted_is_not_touched(tmp_path, prepare, planned):
    out, job = storage.at(tmp_path / "out"), planned()
    with pytest.raises(OSError, match="no sbatch"), output.submitting(out, job, False):
        raise OSError("no sbatch")
    assert not (tmp_path / "out.partial").exists()
    with pytest.raises(DataError, match="job.json"), output.merging(out):
        data_prep.job.Job.load(storage.at(tmp_path / "out.partial"))  # others did it meanwhile
    assert not (tmp_path / "out.partial").exists()
    with output.submitting(out, job, False) as folder:
        pass
    running = folder.path / "splits/00000.another-1.tmp"
    running.mkdir()
    for more in ({}, {"seed": 1}):
        with pytest.raises(DataError, match="was submitted .* not merged yet: wait .*--overwrite"):
            prepare(**more)
    assert running.is_dir()
    do_split(job, 0, folder, Encoder(job.words, ("tokenizers",)))
    with pytest.raises(DataError, match="not done"), output.merging(out):
        output.finish(job, folder, [], out)  # the jobs are over: whoever comes may go on
    assert (folder / "splits/00000/record.json").path.is_file()
    with pytest.raises(DataError, match="unfinished"):  # no longer: was submitted
        prepare()
    manifest = prepare(overwrite=True)
    assert verify(out) == manifest and not folder.exists()
    with output.submitting(out, planned(seed=3), True) as folder:
        pass
    assert prepare() == manifest and (folder / "job.json").path.is_file()
    assert prepare(overwrite=True) == manifest and not folder.exists()


def test_who_merges_submitted_jobs_has_the_lock(tmp_path, prepare, planned, monkeypatch):
    monkeypatch.setattr(lock, "_SECONDS_TO_WAIT", 0)
    with output.submitting(storage.at(tmp_path / "out"), planned(), False):
        pass
    with output.merging(tmp_path / "out"):
        with pytest.raises(lock.Busy, match="another process is preparing"):
            prepare(overwrite=True)
