"""Locks, marks of submitted jobs, and unfinished folders protect the work of other processes."""

import errno
import fcntl
import os
import socket

import pytest

import data_prep
from data_prep import output
from data_prep.encoders import Encoder
from data_prep.process_split import process_split
from nearlinear import storage
from nearlinear.data.format import verify
from nearlinear.errors import DataError
from tests.support.preparing import OPTIONS

pytestmark = pytest.mark.usefixtures("small_splits")


@pytest.fixture
def prepare(tmp_path, toy_vocab, make_plan):
    """Return a function that prepares a.jsonl at `out`."""
    make_plan()
    return lambda **more: data_prep.prepare(
        data_prep.sources.jsonl(tmp_path / "a.jsonl"),
        tmp_path / "out",
        tokenizer=toy_vocab,
        **OPTIONS,
        **more,
    )


def test_lock_refuses_a_second_process(tmp_path, prepare, make_plan, monkeypatch):
    monkeypatch.setattr(output, "_LOCK_TIMEOUT", 0)
    with output.staging(tmp_path / "out", make_plan(), False):
        with pytest.raises(DataError, match="another process is preparing"):
            prepare()


def test_cleanup_spares_work_of_another_process(tmp_path, prepare, make_plan):
    """Return the finished dataset while another process prepares its replacement."""
    out, first = tmp_path / "out", prepare()
    with output.staging(out, make_plan(seed=5), True) as (partial, _):
        (partial.path / "splits/00000.other-1.tmp").mkdir()
        assert prepare() == first
        assert (partial.path / "splits/00000.other-1.tmp").is_dir()
        assert (partial.path / "job.json").is_file()
    for left in ('{"settings": {"seed": 5}}', "cut"):  # without a finished split
        out.with_name("out.partial").mkdir()
        out.with_name("out.partial").joinpath("job.json").write_text(left)
        assert prepare() == first and not out.with_name("out.partial").exists()


def test_removed_lock_is_invalid(tmp_path, make_plan):
    """The previous holder removes no files of the next one."""
    partial = tmp_path / "out.partial"
    with output.staging(tmp_path / "out", make_plan(), False) as (folder, held):
        assert held.is_valid()
        output.remove_folder(folder)
        assert not held.is_valid() and not partial.exists()
        with output.staging(tmp_path / "out", make_plan(), False) as (_, second):
            assert second.is_valid() and not held.is_valid()
            with (
                pytest.raises(output.LockBusyError),
                output.acquire_lock(folder, folder, wait=False),
            ):
                pass
        assert not partial.exists()
        partial.mkdir()
        (partial / output.LOCK_FILE).write_text("the next one's")
    assert (partial / output.LOCK_FILE).read_text() == "the next one's"


def test_lock_is_retaken_if_its_file_is_removed(tmp_path, monkeypatch):
    """The previous holder ends between opening and locking the file."""
    folder, flock, files = storage.as_path(tmp_path / "out.partial"), fcntl.flock, []

    def late(file, how):
        files.append(file.fileno())
        if len(files) == 1:
            output.remove_folder(folder)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with output.acquire_lock(folder, folder) as held:
        assert held.is_valid() and len(files) == 2


def test_file_system_without_locks_is_named(tmp_path, prepare, monkeypatch):
    def none(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(output.fcntl, "flock", none)
    with pytest.raises(DataError, match=r"system without locks \(No locks available\): mount"):
        prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_finished_splits_survive_a_lock_failure(tmp_path, prepare, make_plan, monkeypatch):
    """Another host may mount the folder without locks while a preparation runs."""
    plan = make_plan()
    with pytest.raises(KeyboardInterrupt):
        with output.staging(tmp_path / "out", plan, False) as (folder, _):
            process_split(plan, 0, folder, Encoder(plan.tokenizer, ("tokenizers",)))
            raise KeyboardInterrupt
    before = sorted(tmp_path.rglob("*"))

    def none(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(output.fcntl, "flock", none)
    with pytest.raises(DataError, match="system without locks"):
        prepare()
    assert sorted(tmp_path.rglob("*")) == before
    assert tmp_path / "out.partial/splits/00000/record.json" in before


def test_staging_removes_folders_of_dead_local_processes_only(tmp_path, make_plan):
    out, plan, host = tmp_path / "out", make_plan(), socket.gethostname()
    splits = tmp_path / "out.partial/splits"
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(KeyboardInterrupt), output.staging(out, plan, False) as (folder, _):
        process_split(plan, 0, folder, Encoder(plan.tokenizer, ("tokenizers",)))
        for name in (f"{host}-{child}", f"{host}-{os.getppid()}", "another-1"):
            (splits / f"00001.{name}.tmp").mkdir()
        raise KeyboardInterrupt
    with output.staging(out, plan, False):
        left = {path.name for path in splits.iterdir()}
    assert left == {"00000", f"00001.{host}-{os.getppid()}.tmp", "00001.another-1.tmp"}


def test_submitted_preparation_is_not_touched(tmp_path, prepare, make_plan):
    out, plan = storage.as_path(tmp_path / "out"), make_plan()
    with pytest.raises(OSError, match="no sbatch"), output.submitting(out, plan, False):
        raise OSError("no sbatch")
    assert not (tmp_path / "out.partial").exists()
    with pytest.raises(DataError, match="job.json"), output.merging(out):
        data_prep.plan.PreparationPlan.load(
            storage.as_path(tmp_path / "out.partial")
        )  # merged by another process meanwhile
    assert not (tmp_path / "out.partial").exists()
    with output.submitting(out, plan, False) as folder:
        pass
    running = folder.path / "splits/00000.another-1.tmp"
    running.mkdir()
    for more in ({}, {"seed": 1}):
        with pytest.raises(DataError, match="was submitted .* not merged yet: wait .*--overwrite"):
            prepare(**more)
    assert running.is_dir()
    process_split(plan, 0, folder, Encoder(plan.tokenizer, ("tokenizers",)))
    with pytest.raises(DataError, match="not done"), output.merging(out):
        output.publish(plan, folder, [], out)  # after the merge, any process may resume
    assert (folder / "splits/00000/record.json").path.is_file()
    with pytest.raises(DataError, match="unfinished"):  # instead of: was submitted
        prepare()
    manifest = prepare(overwrite=True)
    assert verify(out) == manifest and not folder.exists()
    with output.submitting(out, make_plan(seed=3), True) as folder:
        pass
    assert prepare() == manifest and (folder / "job.json").path.is_file()
    assert prepare(overwrite=True) == manifest and not folder.exists()


def test_merging_submitted_jobs_holds_the_lock(tmp_path, prepare, make_plan, monkeypatch):
    monkeypatch.setattr(output, "_LOCK_TIMEOUT", 0)
    with output.submitting(storage.as_path(tmp_path / "out"), make_plan(), False):
        pass
    with output.merging(tmp_path / "out"):
        with pytest.raises(output.LockBusyError, match="another process is preparing"):
            prepare(overwrite=True)
