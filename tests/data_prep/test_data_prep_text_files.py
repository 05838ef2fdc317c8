"""Plain text sources: documents are files, lines or paragraphs."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_prep
from data_prep import sources
from data_prep.sources import files, text_files
from data_prep.sources import source as splitting
from nearlinear.errors import DataError
from tests.data_prep.test_data_prep_sources import compressed, write_lines


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("file", ["one\ntwo\n\nthree\n", "# four\n"]),
        ("line", ["one", "two", "", "three", "# four"]),
        ("paragraph", ["one\ntwo", "three\n", "# four\n"]),
    ],
)
def test_text_source_reads_files_lines_and_paragraphs(tmp_path, document, expected):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n\nthree\n")
    (tmp_path / "sub/b.md").write_text("# four\n")
    (tmp_path / "c.png").write_bytes(b"\xff")
    assert list(sources.text([tmp_path], document, allow_unread=True).documents()) == expected


@settings(max_examples=200, deadline=None)
@given(
    raw=st.lists(
        st.sampled_from(["a", "é", "\n", "\n\n", " ", "\r\n", "\u2003", "\x85", "\ufeff", "b c"]),
        max_size=40,
    ).map("".join),
    mark=st.booleans(),
    chunk=st.integers(1, 9),
)
def test_streamed_paragraphs_equal_those_of_the_whole_text(tmp_path_factory, raw, mark, chunk):
    path = tmp_path_factory.mktemp("d") / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" * mark + raw.encode())
    whole = path.read_bytes().decode("utf-8-sig")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_CHUNK_BYTES", chunk)
        assert list(sources.text(path, "paragraph").documents()) == re.split(r"\n\s*\n", whole)
        assert list(sources.text(path).documents()) == [whole]


def test_paragraphs_are_streamed(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("a line\nand another\n\n" * 20_000)
    read, real = [], text_files.read_chunks
    monkeypatch.setattr(
        text_files, "read_chunks", lambda path: (read.append(c) or c for c in real(path))
    )
    documents = sources.text(path, "paragraph").documents()
    for _ in range(6000):  # most of the first chunk
        assert next(documents) == "a line\nand another"
    assert len(read) == 1
    assert len(list(documents)) == 20_001 - 6000 and len(read) > 3


def test_documents_too_long_for_memory_are_refused(tmp_path, monkeypatch):
    for module in (text_files, files):
        monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 100)
        monkeypatch.setattr(files, "_CHUNK_BYTES", 16)
    path = tmp_path / "a.txt"
    path.write_text("word " * 18 + "\n\n" + "word " * 18)
    assert len(list(sources.text(path, "paragraph").documents())) == 2
    with pytest.raises(DataError, match="a.txt has a file of more than 1 GiB.*--document para"):
        sources.text(path)
    packed = compressed(tmp_path / "b.txt.gz", path.read_bytes())
    with pytest.raises(DataError, match="b.txt.gz has a file of more than 1 GiB.*--document para"):
        list(sources.text(packed).documents())
    path.write_text("word\n" * 40)
    with pytest.raises(
        DataError, match="a paragraph of more than 1 GiB.*--document line, or separate"
    ):
        list(sources.text(path, "paragraph").documents())
    assert len(list(sources.text(path, "line").documents())) == 40
    lines = [{"text": "word"}] * 90  # 17 bytes, so chunks rarely end at a line end
    raw = write_lines(tmp_path / "a.jsonl", *lines, {"text": "word " * 14}).read_bytes()
    for path in (tmp_path / "a.jsonl", compressed(tmp_path / "a.jsonl.gz", raw)):
        assert len(list(sources.jsonl(path).documents())) == 91
    write_lines(tmp_path / "a.jsonl", *lines, {"text": "word " * 18}, *lines)
    with pytest.raises(
        DataError, match="a.jsonl has a line of more than 1 GiB.*one object per line"
    ):
        list(sources.jsonl(tmp_path / "a.jsonl").documents())


def test_byte_order_mark_and_invalid_bytes_use_file_offsets(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\n\ufefftwo\r\nthree".encode())
    source = sources.text(path, "line")
    for target in (1, 1000):
        splits = source.plan(target)
        found = [text for split in splits for text in source.read(split)]
        assert found == ["one", "\ufefftwo", "three"] and len(splits) == (3 if target == 1 else 1)
    raw = "\ufeffça va\n".encode() * 3
    path.write_bytes(raw + b"caf\xe9\nmore")
    source = sources.text(path, "line")
    for target in (1, 1000):
        with pytest.raises(DataError, match=rf"not UTF-8 text \(byte {len(raw) + 3}\)"):
            [text for split in source.plan(target) for text in source.read(split)]


@settings(max_examples=15, deadline=None)
@given(
    files=st.lists(
        st.lists(st.text("abc \n", max_size=9), min_size=1, max_size=6).map("\n\n".join),
        min_size=1,
        max_size=9,
    ),
    document=st.sampled_from(["file", "paragraph", "line"]),
    options=st.sampled_from([{}, {"dedup": "exact"}, {"max_documents": 5}, {"max_tokens": 12}]),
    split_bytes=st.integers(1, 60),
)
def test_manifest_counts_documents_of_every_file_in_a_split(
    tmp_path_factory, toy_vocab, files, document, options, split_bytes
):
    folder = tmp_path_factory.mktemp("d")
    for number, text in enumerate(files):
        (folder / f"{number}.txt").write_text(f"{text} a")  # some text in each
    between = {"file": r"(?!)", "line": "\n", "paragraph": r"\n\s*\n"}[document]
    seen, total, expected = set(), 0, []
    for text in files:
        counts = [0, 0]
        for one in filter(str.strip, re.split(between, f"{text} a")):
            full = len(seen) == options.get("max_documents") or total >= options.get(
                "max_tokens", 10**6
            )
            if full or ("dedup" in options and one in seen):
                continue
            seen.add(one if "dedup" in options else len(seen))
            counts[0] += 1
            counts[1] += len(one.split()) + 1
            total += len(one.split()) + 1
        expected.append(counts)
    source = data_prep.sources.text(folder, document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitting, "SPLIT_BYTES", split_bytes)
        manifest = data_prep.prepare(source, folder / "out", tokenizer=toy_vocab, val_fraction=0,
                                     progress=False, workers=1, **options)  # fmt: skip
    assert [[told["documents"], told["tokens"]] for told in manifest.plan["inputs"]] == expected
