"""The output is the complete old or new dataset, however the process ends."""

import os
import shutil
import signal
from itertools import count
from pathlib import Path

import pytest

import data_prep
from data_prep import output, pool
from nearlinear.data.format import verify
from nearlinear.errors import DataError
from tests.support.preparing import OPTIONS, contents, killed_at, write_lines

pytestmark = pytest.mark.usefixtures("small_splits")


@pytest.mark.parametrize(
    ("workers", "exchanges", "step"), [(1, True, 9), (1, False, 9), (2, True, 10)]
)
def test_kill_while_overwriting_leaves_old_or_new_dataset(
    tmp_path, toy_vocab, monkeypatch, workers, exchanges, step
):
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(path, 40)
    if not exchanges:
        monkeypatch.setattr(output, "exchange_paths", lambda one, other: False)

    def prepare(folder, **more):
        source = data_prep.sources.jsonl(path)
        return data_prep.prepare(source, folder, tokenizer=toy_vocab, **{**OPTIONS, **more})

    new, old = prepare(tmp_path / "new"), prepare(tmp_path / "old", seed=1)
    found = []
    for number in count(1, step):
        shutil.copytree(tmp_path / "old", out)
        if not killed_at(number, lambda: prepare(out, overwrite=True, workers=workers)):
            break
        assert out.exists() or not exchanges
        try:
            found.append(prepare(out))
        except DataError as error:
            assert "other settings (seed 1 -> 0)" in str(error)
            found.append(old)
        assert verify(out) == found[-1] and found[-1] in (old, new)
        assert prepare(out, overwrite=True) == new
        assert contents(out) == contents(tmp_path / "new")
        assert {p.name for p in tmp_path.iterdir()} == {"a.jsonl", "out", "old", "new"}
        shutil.rmtree(out)
    assert old in found and (workers == 2 or new in found)


def test_interrupted_replacement_is_restored(tmp_path, toy_vocab, monkeypatch):
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(path)
    monkeypatch.setattr(output, "exchange_paths", lambda one, other: False)
    prepare = lambda **more: data_prep.prepare(  # noqa: E731
        data_prep.sources.jsonl(path), out, tokenizer=toy_vocab, **OPTIONS, **more
    )
    first = prepare()
    rename = os.rename

    def dying(source, target):
        if Path(source).name == "dataset":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    child = os.fork()
    if not child:
        os.rename = dying
        prepare(seed=1, overwrite=True)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]) and not out.exists()
    assert prepare() == first == verify(out)
    done = set(tmp_path.glob("out.partial/splits/*/record.json"))
    assert len(done) > 3, "finished splits of other settings were removed"

    def full(source, target):
        if Path(source).name == "dataset":
            raise OSError("no space")
        rename(source, target)

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="no space"):
        prepare(seed=1, overwrite=True)
    assert verify(out) == first


def test_files_are_synced_before_they_are_renamed(tmp_path, toy_vocab, monkeypatch):
    """Check that files, folders and names are flushed in their final state."""
    synced = {}

    def state(handle):
        found = os.fstat(handle)
        names = sorted(os.listdir(handle)) if os.path.isdir(f"/proc/self/fd/{handle}") else None
        return found.st_ino, (found.st_size, found.st_mtime_ns, names)

    def fsync(handle):
        number, what = state(handle)
        synced[number] = what

    def on_disk(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            number, what = state(handle)
            return synced.get(number) == what
        finally:
            os.close(handle)

    named = []

    def checked(call):
        def naming(source, target, **options):
            for path in (Path(source), *Path(source).rglob("*")):
                assert on_disk(path), path
            named.append(Path(target))
            if Path(target).name == "out":
                assert on_disk(tmp_path / "out.partial/splits")
            return call(source, target, **options)

        return naming

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace", "link"):
        monkeypatch.setattr(os, name, checked(getattr(os, name)))
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(path)
    data_prep.prepare(data_prep.sources.jsonl(path), out, tokenizer=toy_vocab, **OPTIONS)
    names = [path.name for path in named]
    assert names[-1] == "out" and names.count("tokenizer.json") == 2 and "index.json" in names
    assert names.count("shard-00000.bin") == 2 and "00001" in names
    assert "out" in synced[tmp_path.stat().st_ino][2]


def test_merge_refuses_a_missing_split(tmp_path, toy_vocab, monkeypatch):
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(path)
    prepare = lambda: data_prep.prepare(  # noqa: E731
        data_prep.sources.jsonl(path), out, tokenizer=toy_vocab, **OPTIONS
    )
    run = pool.run

    def losing(plan, folder, numbers, *rest):
        run(plan, folder, numbers, *rest)
        shutil.rmtree(folder.path / "splits/00003")

    with monkeypatch.context() as patch:
        patch.setattr(pool, "run", losing)
        with pytest.raises(DataError, match="split 3 of .* is not done: run the same command"):
            prepare()
    assert not out.exists() and len(list(tmp_path.glob("out.partial/splits/*/record.json"))) > 3
    assert prepare() == verify(out)
