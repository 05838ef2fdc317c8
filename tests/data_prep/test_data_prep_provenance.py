"""Every document of a source is found again: in a split at its place, or with its reason."""

import json
import random

import numpy as np
import pytest
import xxhash

import data_prep
from data_prep.__main__ import main
from data_prep.audit import dropped_documents
from data_prep.lookup import find, why
from data_prep.provenance import check_table, read_table
from nearlinear.data.format import MANIFEST_FILE, Manifest
from nearlinear.errors import DataError
from tests.support.preparing import write_rows

OPTIONS = {"progress": False, "val_fraction": 0.2, "backends": ("tokenizers",)}
NAMES = [a + b + c + "ory" for a in "bdfgklmnprst" for b in "aeiou" for c in "lmnrst"]
WORDS = [*NAMES, *("the of and to with be that have".split() * 8)]


@pytest.fixture(scope="module")
def rows():
    """Documents, some of which are blank, short, repeated, or repeated with another word."""
    draw, found = random.Random(5), []
    for number in range(120):
        words = draw.choices(WORDS, k=draw.choice([8, 60, 90]))
        if number % 11 == 3:
            words = found[number - 2]["text"].split()
        elif number % 13 == 5 and len(words) > 50:
            words = [*found[number - 1]["text"].split()[:-1], "different"]
        text = " \n" if number % 17 == 4 else " ".join(words)
        found.append({"text": text, "url": f"https://a.example/{number}", "n": number})
    return found


@pytest.fixture
def table_of():
    """Return a function that reads the table of a dataset."""
    return lambda folder: read_table(folder, Manifest.read(folder))


@pytest.fixture
def texts_of(read_documents, gpt2):
    """Return a function that decodes a dataset: {split: [text, ...]}."""

    def read(folder):
        found = read_documents(folder)
        return {split: list(map(gpt2.decode, documents)) for split, documents in found.items()}

    return read


def check_places(table, texts, kept):
    """Compare the rows of documents in a split with the text at their places."""
    seen = {split: [] for split in kept}
    for row, text in zip(table, texts, strict=True):
        if row["fate"] in kept:
            assert kept[row["fate"]][row["document"] - 1] == text
            assert row["hash"] == xxhash.xxh3_128_digest(text.encode())
            assert row["bytes"] == len(text.encode())
            seen[row["fate"]].append(row["document"])
    assert {split: [*range(1, len(found) + 1)] for split, found in kept.items()} == seen


def test_each_document_has_place_or_reason(rows, tmp_path, table_of, texts_of, small_splits):
    pytest.importorskip("numba")
    pytest.importorskip("spacy")
    files = [write_rows(tmp_path / "a.jsonl", rows[:70]),
             write_rows(tmp_path / "b.jsonl.gz", rows[70:])]  # fmt: skip
    source = data_prep.sources.jsonl(files, fields=("url", "n"))
    assert len(source.splits()) > 4
    options = {**OPTIONS, "filters": ("gopher",), "near_duplicates": "minhash", "dedup": "exact"}
    data_prep.prepare(source, tmp_path / "d", workers=1, **options)
    table, texts = table_of(tmp_path / "d"), [row["text"] for row in rows]
    places = [(0, number) for number in range(1, 71)] + [(1, number) for number in range(1, 51)]
    assert [(row["input"], row["number"]) for row in table] == places
    assert [row["fields"] for row in table] == [
        {"url": row["url"], "n": str(row["n"])} for row in rows
    ]
    check_places(table, texts, texts_of(tmp_path / "d"))

    by_rules = {(each.input, each.document): each.rule
                for each in dropped_documents(source, ["gopher"])}  # fmt: skip
    seen = {}
    for row, text in zip(table, texts, strict=True):
        rule = by_rules.get((str(files[row["input"]]), row["number"]))
        if rule is not None:
            assert row["fate"] == rule and row["tokens"] is None
        elif text in seen:
            assert row["fate"] == "exact duplicate"
        else:
            assert row["fate"] in ("train", "val", "near-duplicate")
            seen[text] = row
    fates = [row["fate"] for row in table]
    assert fates.count("blank") == 8 and fates.count("exact duplicate") > 3
    assert sum(fate.startswith("gopher: ") for fate in fates) > 5
    near = [place for place, fate in enumerate(fates) if fate == "near-duplicate"]
    assert near == [place for place, text in enumerate(texts) if text.endswith("different")
                    and fates[place - 1] in ("train", "val")]  # fmt: skip
    for place in near:
        name, number = files[table[place]["input"]], table[place]["number"]
        found = why(tmp_path / "d", f"{name.name}:{number}")
        assert found.fate == "near-duplicate" and found.like == f"{name}:{number - 1}"
    place = fates.index("exact duplicate")
    found = why(tmp_path / "d", f"a.jsonl:{place + 1}")
    assert found.like == f"{files[0]}:{texts.index(texts[place]) + 1}"
    assert found.fields["url"] == rows[place]["url"]


@pytest.mark.parametrize("limit", [{"max_documents": 30}, {"max_tokens": 700}])
def test_limits_end_the_table(rows, tmp_path, table_of, texts_of, small_splits, limit):
    source = data_prep.sources.jsonl(write_rows(tmp_path / "a.jsonl", rows))
    for workers in 1, 2:
        data_prep.prepare(source, tmp_path / f"d{workers}", workers=workers, **limit, **OPTIONS)
    table = table_of(tmp_path / "d1")
    assert table == table_of(tmp_path / "d2")
    kept = [row for row in table if row["fate"] in ("train", "val")]
    assert [row["number"] for row in table] == [*range(1, len(table) + 1)]
    assert {row["fate"] for row in table} <= {"train", "val", "blank", "limit"}
    check_places(table, [row["text"] for row in rows[: len(table)]], texts_of(tmp_path / "d1"))
    if "max_documents" in limit:
        assert len(kept) == 30 and "fields" not in table[0]
    with pytest.raises(DataError, match="a limit ends a preparation"):
        why(tmp_path / "d1", "a.jsonl:120")


def test_bad_lines_have_no_number(tmp_path, table_of, small_splits):
    """A line that is skipped is no document; lines that only Python's json reads are."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "url": "u1"}\n{"text": 3, "url": "no"}\n\n'
                    '{"text": "two \\ud800", "url": NaN}\n{"text": "three", "url": {"a": [1]}}\n'
                    '{"text": "four"}\n')  # fmt: skip
    source = data_prep.sources.jsonl(path, skip_bad_lines=True, fields=("url",))
    data_prep.prepare(source, tmp_path / "d", workers=1, **OPTIONS)
    found = [(row["number"], row["fields"]["url"]) for row in table_of(tmp_path / "d")]
    assert found == [(1, "u1"), (2, "NaN"), (3, '{"a": [1]}'), (4, None)]


def test_fields_of_parquet_and_of_saved_datasets(rows, tmp_path, table_of, texts_of):
    import datasets
    import pyarrow as pa
    from pyarrow import parquet

    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns["text"][7] = None
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=25)
    source = data_prep.sources.parquet(
        tmp_path / "a.parquet", skip_bad_lines=True, fields=("n", "url")
    )
    data_prep.prepare(source, tmp_path / "p", workers=1, **OPTIONS)
    left = [row for place, row in enumerate(rows) if place != 7]
    table = table_of(tmp_path / "p")
    assert [row["fields"]["n"] for row in table] == [str(row["n"]) for row in left]
    check_places(table, [row["text"] for row in left], texts_of(tmp_path / "p"))

    datasets.Dataset.from_list(left).save_to_disk(str(tmp_path / "saved"))
    source = data_prep.sources.huggingface(str(tmp_path / "saved"), fields=("url",))
    data_prep.prepare(source, tmp_path / "h", workers=1, **OPTIONS)
    assert [row["fields"]["url"] for row in table_of(tmp_path / "h")] == [
        row["url"] for row in left
    ]
    assert why(tmp_path / "h", "saved:2").fields == {"url": left[1]["url"]}


@pytest.mark.parametrize("tokenizer", ["gpt2", "words"])
def test_text_is_found_where_it_occurs(tokenizer, tmp_path, toy_vocab):
    """Compare with a search in the files; matches do not cross the ends of documents."""
    draw = random.Random(2)
    letters = "abcdefg" if tokenizer == "words" else "abcdé—字"
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = {}
    for number in range(60):
        texts[f"{number:02d}.txt"] = " ".join(draw.choices(letters, k=draw.randrange(1, 40)))
        (folder / f"{number:02d}.txt").write_text(texts[f"{number:02d}.txt"])
    options = {**OPTIONS, "tokenizer": "gpt2" if tokenizer == "gpt2" else toy_vocab}
    data_prep.prepare(data_prep.sources.text([folder]), tmp_path / "d", workers=1, **options)
    for _ in range(12):
        wanted = " ".join(draw.choices(letters, k=draw.choice([1, 2, 3])))
        found = list(find(tmp_path / "d", wanted))
        counts = {name: text.count(wanted) for name, text in texts.items() if wanted in text}
        names = [match.origin.input.rpartition("/")[2] for match in found]
        assert {name: names.count(name) for name in names} == counts
        for match, name in zip(found, names, strict=True):
            assert match.before + match.text + match.after in texts[name]
            assert match.origin == why(tmp_path / "d", f"{match.split}:{match.document}")


def test_command_line_finds_and_explains(rows, tmp_path, capsys):
    corpus, out = write_rows(tmp_path / "a.jsonl", rows), str(tmp_path / "d")
    arguments = ["jsonl", str(corpus), "--out", out, "--keep-fields", "url", "--workers", "1"]
    assert main([*arguments, "--backend", "tokenizers"]) == 0
    assert main(["find", out, rows[0]["text"], "--json"]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert json.loads(line)["origin"]["fields"] == {"url": rows[0]["url"]}
    assert main(["find", out, "the", "--limit", "2"]) == 0
    assert "--limit 4" in capsys.readouterr().out
    assert main(["find", out, "no such text"]) == 0
    assert "no document" in capsys.readouterr().out
    assert main(["why", out, "a.jsonl:5", "train:1", "train@0"]) == 0
    blank, *documents = capsys.readouterr().out.split(f"{corpus}:")[1:]
    assert blank.startswith("5  left out: blank\n  url: https://a.example/4")
    assert documents[0] == documents[1] and "document 1 of train" in documents[0]
    faults = {"b.jsonl:1": "no input", "a.jsonl": "write FILE:NUMBER", "train:999": "it has",
              "train@99999999": "tokens, from 0"}  # fmt: skip
    for wrong, reason in faults.items():
        assert main(["why", out, wrong]) == 2
        assert reason in capsys.readouterr().err
    assert main([*arguments[:4], "--keep-fields", "ulr", "--overwrite", "--workers", "1"]) == 2
    assert "'ulr'" in capsys.readouterr().err
    assert main([*arguments[:4], "--keep-fields", "text", "--overwrite"]) == 2


def test_damage_of_the_table_is_named(rows, tmp_path, capsys):
    source = data_prep.sources.jsonl(write_rows(tmp_path / "a.jsonl", rows))
    manifest = data_prep.prepare(source, tmp_path / "d", workers=1, **OPTIONS)
    path = tmp_path / "d" / "documents.parquet"
    raw, draw = path.read_bytes(), np.random.default_rng(3)
    for bit in draw.integers(0, 8 * len(raw), 200).tolist():
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"documents\.parquet is altered"):
            check_table(tmp_path / "d", manifest)
    assert main(["verify", str(tmp_path / "d")]) == 2
    assert "documents.parquet is altered" in capsys.readouterr().err
    path.write_bytes(raw)
    assert main(["verify", str(tmp_path / "d")]) == 0
    older = manifest.plan.copy()
    del older["documents"]
    object.__setattr__(manifest, "plan", older)
    (tmp_path / "d" / MANIFEST_FILE).unlink()
    manifest.write(tmp_path / "d")
    assert main(["why", str(tmp_path / "d"), "train:1"]) == 2
    assert "older version" in capsys.readouterr().err
    assert next(find(tmp_path / "d", "the")).origin is None
