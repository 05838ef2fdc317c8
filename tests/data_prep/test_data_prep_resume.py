"""Bytes do not depend on workers, order, or interruptions."""

import json
import os
import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_prep
from data_prep import pool
from data_prep.sources import source as splitting
from nearlinear.data.format import verify
from nearlinear.errors import DataError
from tests.support.preparing import OPTIONS, contents, killed_at, write_lines

pytestmark = pytest.mark.usefixtures("small_splits")


@pytest.mark.parametrize("options", [{}, {"dedup": "exact", "max_documents": 100}])
def test_resume_after_kill_gives_the_same_bytes(tmp_path, toy_vocab, options):
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(path)
    reference = tmp_path / "reference"

    def prepare(folder):
        source = data_prep.sources.jsonl(path)
        return data_prep.prepare(source, folder, tokenizer=toy_vocab, **OPTIONS, **options)

    expected = prepare(reference)
    again = 0
    for number in count(1, 11):
        if not killed_at(number, lambda: prepare(out)):
            break
        again += out.with_name("out.partial").exists() and not out.exists()
        assert not out.exists() or verify(out) == expected
        assert prepare(out) == expected and contents(out) == contents(reference)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out", "reference"]
        for file in sorted(out.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        out.rmdir()
    assert again > 5


def test_resume_skips_finished_splits(tmp_path, toy_vocab, monkeypatch):
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(path)
    done, process_split = [], pool.process_split

    def stopping(plan, number, *arguments):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(number)
        return process_split(plan, number, *arguments)

    monkeypatch.setattr(pool, "process_split", stopping)
    prepare = lambda **more: data_prep.prepare(  # noqa: E731
        data_prep.sources.jsonl(path), out, tokenizer=toy_vocab, **OPTIONS, **more
    )
    with pytest.raises(KeyboardInterrupt):
        prepare()
    with pytest.raises(DataError, match=r"unfinished .*\(seed 0 -> 1\): pass --overwrite"):
        prepare(seed=1)
    assert done == [0, 1]
    done[:] = [-1]
    shard = out.with_name("out.partial") / "splits/00001/train/shard-00000.bin"
    shard.write_bytes(bytes(len(shard.read_bytes())))
    with pytest.raises(KeyboardInterrupt):
        prepare()
    assert done == [-1, 1]  # the first split is intact, the second damaged
    done[:] = [-1]
    os.utime(path, (1, 1))
    with pytest.raises(KeyboardInterrupt):
        prepare()
    assert done == [-1, 2]
    path.write_text(path.read_text().replace("a", "b", 1))
    with pytest.raises(DataError, match="different text in input split 0"):
        prepare()


@pytest.mark.parametrize("engine", ["two workers", "backwards", "batches of one"])
def test_bytes_do_not_depend_on_workers_order_or_batches(tmp_path, toy_vocab, engine, monkeypatch):
    path = tmp_path / "a.jsonl"
    texts = write_lines(path)
    source = data_prep.sources.jsonl(path)
    expected = data_prep.prepare(source, tmp_path / "one", tokenizer=toy_vocab, **OPTIONS)
    options = dict(OPTIONS)
    if engine == "two workers":
        options["workers"] = 2
    elif engine == "backwards":
        run = pool.run
        monkeypatch.setattr(
            pool, "run", lambda plan, folder, numbers, *rest: run(
                plan, folder, iter(sorted(numbers, reverse=True)), *rest)
        )  # fmt: skip
    else:
        monkeypatch.setattr("data_prep.documents._BATCH_CHARACTERS", 1)
    assert len(source.splits()) > 4
    found = data_prep.prepare(source, tmp_path / "two", tokenizer=toy_vocab, **options)
    assert found == expected and contents(tmp_path / "two") == contents(tmp_path / "one")
    assert found.statistics["documents"] == len(texts)
    assert found.statistics["duplicates"]["documents"] == len(texts) - len(set(texts))


def test_val_documents_are_merged_into_full_shards(tmp_path, toy_vocab, read_documents):
    """Check shard sizes and document order."""
    path = tmp_path / "a.jsonl"
    texts = write_lines(path)
    options = {**OPTIONS, "shard_tokens": 200}
    source = data_prep.sources.jsonl(path)
    manifest = data_prep.prepare(source, tmp_path / "d", tokenizer=toy_vocab, **options)
    sizes = [shard.tokens for shard in manifest.splits["val"]]
    assert len(source.splits()) > len(sizes) > 1
    assert all(200 - 31 < size <= 200 for size in sizes[:-1])
    found = [" ".join("?abcdefg"[i] for i in ids) for ids in read_documents(tmp_path / "d")["val"]]
    assert found == [text for text in texts if text in set(found)]


@settings(max_examples=15, deadline=None)
@given(
    texts=st.lists(st.text("abc \n", max_size=8), min_size=1, max_size=60),
    most=st.one_of(st.none(), st.integers(1, 70)),
    tokens=st.one_of(st.none(), st.integers(1, 200)),
    dedup=st.sampled_from([None, "exact"]),
    split_bytes=st.integers(20, 400),
)
def test_limits_and_dedup_do_not_depend_on_splits(
    tmp_path_factory, toy_vocab, texts, most, tokens, dedup, split_bytes
):
    folder = tmp_path_factory.mktemp("d")
    splitting.SPLIT_BYTES = split_bytes  # restored by the fixture
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    lengths = lambda text: len(text.split()) + 1  # noqa: E731
    read = [text for text in texts if text.strip()][:most]
    if tokens is not None:
        sums = [sum(map(lengths, read[:n])) for n in range(len(read))]
        read = [text for text, before in zip(read, sums, strict=True) if before < tokens]
    expected = list(dict.fromkeys(read)) if dedup else read
    options = {**OPTIONS, "val_fraction": 0, "max_documents": most, "max_tokens": tokens}
    prepare = lambda: data_prep.prepare(  # noqa: E731
        data_prep.sources.jsonl(path),
        folder / "out",
        tokenizer=toy_vocab,
        dedup=dedup,
        **options,
    )
    if not read:
        with pytest.raises(DataError, match="no document with text"):
            prepare()
        return
    manifest = prepare()
    assert verify(folder / "out") == manifest
    assert manifest.total("tokens") == sum(map(lengths, expected))
    assert manifest.statistics["documents"] == len(expected)
    assert manifest.statistics["duplicates"]["documents"] == len(read) - len(set(read))
    assert sum(manifest.statistics["length_histogram"]["documents"]) == len(expected)


def test_killed_worker_is_named_and_other_splits_are_kept(tmp_path, toy_vocab, monkeypatch):
    """Kill one of two workers, during a split or between splits."""
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(path, documents=800)
    source, options = data_prep.sources.jsonl(path), {**OPTIONS, "workers": 2}
    expected = data_prep.prepare(source, tmp_path / "one", tokenizer=toy_vocab, **OPTIONS)
    answer, draw, done = pool._WorkerProcess._wait_for, random.Random(0), set()
    for at_work in (True, False, True, False):
        number, calls = draw.randrange(1, 6), count(1)

        def dying(worker, kind, bar, deadly=number, calls=calls, at_work=at_work):
            turn = next(calls)
            if turn != deadly or not at_work:
                answer(worker, kind, bar)
            if turn == deadly:
                worker._process.kill()
                worker._process.wait()
                if at_work:
                    answer(worker, kind, bar)

        monkeypatch.setattr(pool._WorkerProcess, "_wait_for", dying)
        with pytest.raises(
            DataError, match=r"a worker ended \(exit code -9\).*run the command again"
        ):
            data_prep.prepare(source, out, tokenizer=toy_vocab, **options)
        assert not out.exists()
        found = {p.name for p in out.with_name("out.partial").glob("splits/*[0-9]")}
        assert found >= done
        done = found
    assert 0 < len(done) < len(source.splits())
    monkeypatch.setattr(pool._WorkerProcess, "_wait_for", answer)
    assert data_prep.prepare(source, out, tokenizer=toy_vocab, **options) == expected
    assert contents(out) == contents(tmp_path / "one")


def test_worker_names_a_bad_line(tmp_path, toy_vocab):
    path = tmp_path / "a.jsonl"
    write_lines(path)
    path.write_text(path.read_text() + "{\n")
    with pytest.raises(DataError, match=r"a.jsonl:131 is not JSON"):
        data_prep.prepare(data_prep.sources.jsonl(path), tmp_path / "out", tokenizer=toy_vocab,
                          **{**OPTIONS, "workers": 2})  # fmt: skip
    assert not (tmp_path / "out").exists()
