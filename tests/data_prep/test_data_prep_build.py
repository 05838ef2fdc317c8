import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import data_prep
from data_prep import documents, output, pool
from data_prep.resume import HISTORY_FILE
from nearlinear.data.dataset import TokenDataset
from nearlinear.data.format import Manifest, verify
from nearlinear.errors import DataError

TEXTS = [f"Document number {i} says {'word ' * (i % 7)}end." for i in range(300)]


def prepare(source, out, **options):
    return data_prep.prepare(source, out, **{"progress": False, "val_fraction": 0.1, **options})


def contents(folder):
    """Map each file except the history to its hash."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in folder.rglob("*") if p.is_file() and p.name != HISTORY_FILE}  # fmt: skip


def test_prepare_round_trips_documents_in_order(tmp_path, source, gpt2, read_documents):
    texts = [*TEXTS, "a<|endoftext|>b", "日本語 👩‍👧 é", "  kept as it is \n"]
    manifest = prepare(source(texts), tmp_path / "d")
    splits = read_documents(tmp_path / "d")
    decoded = {split: [gpt2.decode(ids) for ids in found] for split, found in splits.items()}
    assert sorted(decoded["train"] + decoded["val"]) == sorted(texts)
    for found in decoded.values():
        assert found == [text for text in texts if text in set(found)]
    assert 10 < len(decoded["val"]) < 60
    assert not any(gpt2.eos_id in ids for found in splits.values() for ids in found)
    assert manifest.total("documents") == len(texts)
    assert manifest.source["text_bytes"] == sum(len(text.encode()) for text in texts)
    verify(tmp_path / "d")


def test_bos_precedes_every_document(tmp_path, source, toy_vocab, read_documents):
    vocabulary = json.loads(Path(toy_vocab).read_text())
    added = vocabulary["added_tokens"]
    vocabulary["added_tokens"] = [*added, {**added[0], "id": 9, "content": "<s>"}]
    (tmp_path / "words.json").write_text(json.dumps(vocabulary))
    options = {"tokenizer": str(tmp_path / "words.json"), "val_fraction": 0.0}
    texts = ["a b", "c <s> d", "e"]
    prepare(source(texts), tmp_path / "d", bos_token="<s>", **options)
    found = read_documents(tmp_path / "d")["train"]
    assert found == [[9, 1, 2], [9, 3, 0, 4], [9, 5]]
    verify(tmp_path / "d")
    with pytest.raises(DataError, match="bos_token"):  # other settings
        prepare(source(texts), tmp_path / "d", **options)
    for token, message in (("a", "text becomes that token"), ("x", "is not in the vocabulary of")):
        with pytest.raises(DataError, match=f"bos_token is '{token}': .*{message}|{message}"):
            prepare(source(texts), tmp_path / "e", bos_token=token, **options)


def test_token_dataset_reads_prepared_documents(tmp_path, source, gpt2):
    prepare(source(TEXTS), tmp_path / "d", shard_tokens=100)
    tokens = TokenDataset(tmp_path / "d", sequence_length=64)
    assert len(tokens.manifest.splits["train"]) > 10
    stream = tokens.windows(np.arange(len(tokens))).reshape(-1)
    documents = "".join(
        "|" if i == gpt2.eos_id else gpt2.decode([i]) for i in stream.tolist()
    ).split("|")
    assert all(text in TEXTS for text in documents[:-1])


def test_val_assignment_depends_on_text_and_seed_only(tmp_path, source, read_documents):
    texts = TEXTS[:150] + TEXTS[:150] + TEXTS[:150]
    prepare(source(texts), tmp_path / "a")
    prepare(source(texts[::-1]), tmp_path / "b")
    prepare(source(texts), tmp_path / "c", seed=1)
    one, two, three = (read_documents(tmp_path / name) for name in "abc")
    assert {tuple(i) for i in one["train"]}.isdisjoint(tuple(i) for i in one["val"])
    assert sorted(one["val"]) == sorted(two["val"]) != sorted(three["val"])


def test_shard_bytes_do_not_depend_on_batch_size(tmp_path, source, monkeypatch):
    prepare(source(TEXTS), tmp_path / "a", shard_tokens=500)
    monkeypatch.setattr(documents, "_BATCH_CHARACTERS", 100)
    prepare(source(TEXTS), tmp_path / "b", shard_tokens=500)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("texts", [TEXTS[:2], TEXTS[:5], TEXTS[:4] * 3])
def test_small_source_gets_one_val_document(tmp_path, source, read_documents, texts):
    manifest = prepare(source(texts), tmp_path / "d", val_fraction=1e-9, shard_tokens=9)
    splits = read_documents(tmp_path / "d")
    assert len({tuple(ids) for ids in splits["val"]}) == 1
    assert {tuple(i) for i in splits["train"]}.isdisjoint(tuple(i) for i in splits["val"])
    assert len(splits["train"]) + len(splits["val"]) == len(texts)
    files = {s.file for shards in manifest.splits.values() for s in shards}
    assert {str(p.relative_to(tmp_path / "d")) for p in tmp_path.rglob("*.bin")} == files


@pytest.mark.parametrize(("texts", "fraction"), [(TEXTS[:9], 0.0), (["same"] * 4, 0.01)])
def test_val_is_empty_for_zero_fraction_or_equal_documents(tmp_path, source, texts, fraction):
    manifest = prepare(source(texts), tmp_path / "d", val_fraction=fraction)
    assert manifest.total("documents", "val") == 0
    assert manifest.total("documents", "train") == len(texts)


@pytest.mark.parametrize(
    ("texts", "options", "match"),
    [
        ([], {}, "no document with text"),
        (["", " \n\t "], {}, "no document with text"),
        (["x"], {"val_fraction": 0.9999999}, "all documents fell into val.*lower it"),
        (["x"], {"val_fraction": 1.0}, "val_fraction is 1.0"),
        (["x"], {"max_tokens": 0}, "max_tokens is 0"),
        (["x"], {"shard_tokens": 0}, "shard_tokens is 0"),
        (["x"], {"tokenizer": "none.json"}, "no tokenizer at none.json"),
    ],
)
def test_prepare_errors_leave_no_files(tmp_path, source, texts, options, match):
    with pytest.raises(DataError, match=match):
        prepare(source(texts), tmp_path / "d", **options)
    assert not list(tmp_path.iterdir())


def test_encoder_is_verified_on_every_input_split(
    tmp_path, source, gpt2, read_documents, monkeypatch
):
    """Use an encoder that is only correct for splits it was verified on."""
    certified = []

    class Doubtful:
        name = "doubtful"

        def verify_sample(self, texts):
            certified.append(texts[0])

        def __call__(self, texts):
            ids = gpt2.encode_batch(texts)
            wrong = texts[0] not in certified
            return (np.array([i ^ wrong for one in ids for i in one], np.uint32),
                    np.array([len(one) for one in ids]))  # fmt: skip

    monkeypatch.setattr(pool, "get_encoder", lambda tokenizer, names: Doubtful())
    texts = {0: ["one", "two"], 1: ["three", "four"]}
    split = data_prep.sources.InputSplit
    made = source([], plan=lambda target: [split(0, n, n + 1) for n in texts],
                  reader=lambda piece: iter([texts[piece.start]]))  # fmt: skip
    prepare(made, tmp_path / "d", val_fraction=0)
    assert certified == ["one", "three"]
    expected = [gpt2.encode(text) for some in texts.values() for text in some]
    assert read_documents(tmp_path / "d")["train"] == expected


def test_limits_keep_whole_documents(tmp_path, source, gpt2, read_documents):
    lengths = np.cumsum([len(ids) + 1 for ids in gpt2.encode_batch(TEXTS)])
    manifest = prepare(source(["", *TEXTS]), tmp_path / "a", max_documents=7)
    assert manifest.total("documents") == 7
    for limit in (1, int(lengths[9]), int(lengths[9]) + 1):
        manifest = prepare(source(TEXTS), tmp_path / str(limit), max_tokens=limit)
        expected = int(lengths[np.searchsorted(lengths, limit)])
        assert manifest.total("tokens") == expected >= limit


def test_lone_surrogates_become_question_marks(tmp_path, source, gpt2, read_documents):
    prepare(source(["bad \ud800 text"]), tmp_path / "d")
    assert [gpt2.decode(i) for i in read_documents(tmp_path / "d")["train"]] == ["bad ? text"]


def test_prepare_reuses_dataset_with_same_settings(tmp_path, source, capsys):
    out = tmp_path / "d"
    first = prepare(source(TEXTS, provenance={"botocore": "1"}), out)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    again = prepare(source(TEXTS, provenance={"botocore": "2"}), out, progress=True)
    assert again == first
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before
    said = capsys.readouterr().err
    assert "already prepared with these settings and intact" in said
    assert "made with botocore 1 and 2 is installed now" in said


def test_prepare_refuses_other_settings_unless_overwrite(tmp_path, source):
    out = tmp_path / "d"
    first = prepare(source(TEXTS), out)
    with pytest.raises(DataError, match=r"\(val_fraction 0.1 -> 0.2, seed 0 -> 3\): pass --overwr"):
        prepare(source(TEXTS), out, val_fraction=0.2, seed=3)
    for texts in (TEXTS[1:], TEXTS[:-1], [*TEXTS, "one more"]):
        with pytest.raises(DataError, match=r"\(different text in input split 0\)"):
            prepare(source(texts), out)
    assert verify(out) == first
    second = prepare(source(TEXTS), out, seed=3, overwrite=True)
    assert verify(out) == second != first
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_prepare_names_damage_and_overwrites_it(tmp_path, source):
    out = tmp_path / "d"
    prepare(source(TEXTS), out)
    shard = out / "train/shard-00000.bin"
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    with pytest.raises(DataError, match="shard-00000.bin is altered.*--overwrite"):
        prepare(source(TEXTS), out)
    prepare(source(TEXTS), out, overwrite=True)
    (out / "index.json").write_text((out / "index.json").read_text()[:-50])
    prepare(source(TEXTS), out, overwrite=True)
    verify(out)


def test_prepare_never_replaces_a_foreign_folder(tmp_path, source):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/index.json").write_text('{"thesis": 1}')
    for overwrite in (False, True):
        with pytest.raises(DataError, match="not a folder of token shards"):
            prepare(source(TEXTS), tmp_path / "home", overwrite=overwrite)
    assert (tmp_path / "home/index.json").read_text() == '{"thesis": 1}'
    (tmp_path / "empty").mkdir()
    prepare(source(TEXTS), tmp_path / "empty")


@pytest.mark.parametrize("overwrite", [False, True])
def test_interruption_leaves_existing_output_unchanged(tmp_path, source, overwrite):
    out = tmp_path / "d"
    before = prepare(source(TEXTS), out) if overwrite else None

    def interrupted():
        yield from TEXTS
        raise KeyboardInterrupt

    broken = data_prep.Source(name="memory", documents=interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(broken, out, overwrite=overwrite)
    if overwrite:
        assert verify(out) == before
        assert [p.name for p in tmp_path.iterdir()] == ["d"]
    else:
        assert not list(tmp_path.iterdir())


KILLED = """
import itertools, sys, data_prep
def documents():
    for i in itertools.count():
        yield f"document {i}"
data_prep.prepare(data_prep.Source("endless", documents), sys.argv[1], shard_tokens=1000)
"""


def test_killed_preparation_is_invalid_and_cleared_by_the_next(tmp_path, source, monkeypatch):
    out, partial = tmp_path / "d", tmp_path / "d.partial"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(out)])
    try:
        deadline = time.monotonic() + 30
        while (
            len(list(partial.glob("splits/*.tmp/train/*.idx"))) < 3 and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        monkeypatch.setattr(output, "_LOCK_TIMEOUT", 0)
        with pytest.raises(DataError, match="another process is preparing"):
            prepare(source(TEXTS), out)
        assert process.poll() is None
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert list(partial.glob("splits/*.tmp/train/*.idx"))[2:] and not out.exists()
    with pytest.raises(DataError, match="did not finish"):
        Manifest.read(partial)
    manifest = prepare(source(TEXTS), out)
    assert verify(out) == manifest and not partial.exists()
    prepare(source(TEXTS), tmp_path / "clean")
    assert contents(out) == contents(tmp_path / "clean")


def test_large_vocabulary_is_stored_as_uint32(tmp_path, source, read_documents):
    path = tmp_path / "tokenizer.json"
    vocabulary = {"?": 0, "a": 1, "b": 70_000}
    path.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [{"id": 3, "content": "</s>", "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": True}],
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
    }))  # fmt: skip
    manifest = prepare(source(["a b", "b </s> a"]), tmp_path / "d", tokenizer=str(path),
                       val_fraction=0)  # fmt: skip
    assert manifest.dtype.name == "uint32"
    assert read_documents(tmp_path / "d")["train"] == [[1, 70_000], [70_000, 0, 1]]
    assert (tmp_path / "d/tokenizer/tokenizer.json").read_bytes() == path.read_bytes()
