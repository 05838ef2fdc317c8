import bz2
import errno
import gzip
import json
import lzma
import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import sources
from data_prep.sources import botocore_docs, files
from nearlinear.errors import DataError


def write_lines(path, *lines):
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode()
                                for x in lines))  # fmt: skip
    return path


def test_jsonl_reads_plain_and_gzip_files_in_order(tmp_path):
    plain = write_lines(tmp_path / "a.jsonl", {"text": "one"}, b"", {"text": "zwei é", "id": 2})
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"text": "three"}\n'))
    source = sources.jsonl([plain, packed])
    assert list(source.documents()) == ["one", "zwei é", "three"]
    assert list(source.documents()) == ["one", "zwei é", "three"]
    assert list(sources.jsonl(plain).documents()) == ["one", "zwei é"]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b'{"text": "cut of', "a.jsonl:2 is not JSON .*--skip-bad-lines"),
        (b"\xff\xfe", "a.jsonl:2 is not JSON"),
        (b'["text"]', "a.jsonl:2 is JSON but not an object"),
        (
            {"content": "x", "id": 1},
            "a.jsonl:2 has no field 'text', only 'content', 'id'.*--text-",
        ),
        ({"text": 3}, "a.jsonl:2 has a int in field 'text', not text"),
        ({"text": None}, "a.jsonl:2 has a NoneType in field 'text'"),
        (b'{"text": ' + b"[" * 100_000, "a.jsonl:2 is not JSON .*recursion.*--skip-bad-lines"),
    ],
)
def test_jsonl_names_or_skips_bad_lines(tmp_path, caplog, line, match):
    path = write_lines(tmp_path / "a.jsonl", {"text": "one"}, line, {"text": "three"})
    with pytest.raises(DataError, match=match):
        list(sources.jsonl([path]).documents())
    assert list(sources.jsonl([path], skip_bad_lines=True).documents()) == ["one", "three"]
    assert "skipped 1 bad lines" in caplog.text and "a.jsonl:2" in caplog.text


def flipped(raw, byte, bit=3):
    raw = bytearray(raw)
    raw[byte] ^= 1 << bit
    return bytes(raw)


def test_every_spelling_and_compression_is_read(tmp_path):
    names = ["a.jsonl", "b.ndjson", "c.json", "d.JSONL", "e.jsonl.gz", "f.jsonl.BZ2", "g.json.xz",
             "h.ndjson.zst"]  # fmt: skip
    for name in names:
        compressed(tmp_path / name, json.dumps({"text": name}).encode() + b"\n")
    assert list(sources.jsonl([tmp_path]).documents()) == names
    assert sources.jsonl([tmp_path]).unread == ()


def test_unread_inputs_are_errors_unless_allowed(tmp_path):
    folder, outside = tmp_path / "crawl", tmp_path / "outside"
    (folder / "sub").mkdir(parents=True)
    (folder / ".cache").mkdir()
    outside.mkdir()
    write_lines(folder / "sub" / "b.jsonl", {"text": "b"})
    write_lines(outside / "c.jsonl", {"text": "c"})
    for ignored in ("_SUCCESS", ".part.crc", ".cache/x.jsonl"):
        (folder / ignored).write_text("")
    (folder / "linked").symlink_to(outside)
    assert list(sources.jsonl([folder]).documents()) == ["c", "b"]
    (folder / "again").symlink_to(folder)
    (folder / "a.csv").write_text("text\n")
    (folder / "gone.jsonl").symlink_to(tmp_path / "none")
    with pytest.raises(DataError, match=r"a.csv \(not .jsonl, .*\), .*again \(a link to a folder "
                       r"that .*\), .*gone.jsonl \(a link .*--allow-unread"):  # fmt: skip
        sources.jsonl([folder])
    source = sources.jsonl([folder], allow_unread=True)
    assert [Path(path).name for path, _ in source.unread] == ["a.csv", "again", "gone.jsonl"]
    assert list(source.documents()) == ["c", "b"]
    assert list(sources.rebuild(source.spec).documents()) == ["c", "b"]


def test_unreadable_folders_are_listed(tmp_path, monkeypatch):
    write_lines(tmp_path / "a.jsonl", {"text": "a"})
    (tmp_path / "locked").mkdir()
    scan = os.scandir

    def scandir(path):  # root may read every folder
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"locked \(Permission denied\) would not be read"):
        sources.jsonl([tmp_path])


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (gzip.compress(b"text\n" * 99), "is a gzip file: rename it"),
        (b"PK\x03\x04\xff\xff", "is a zip archive: unpack it"),
        ("text".encode("utf-16"), "is UTF-16 text: convert it"),
        (b"WARC/1.0\r\nWARC-Type: response\r\n", "is a web archive .*: extract the text"),
    ],
    ids=["gzip", "zip", "utf-16", "warc"],
)
@pytest.mark.parametrize("document", ["file", "line", "paragraph"])
def test_files_of_another_kind_are_named(tmp_path, raw, match, document):
    (tmp_path / "a.txt").write_bytes(raw)
    with pytest.raises(DataError, match=f"a.txt {match}"):
        list(sources.text([tmp_path / "a.txt"], document).documents())


def test_corrupt_gzip_is_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(1000)))
    for broken in (whole[:-9], b"plain", b"", flipped(whole, len(whole) // 2), flipped(whole, 14)):
        path.write_bytes(broken)
        with pytest.raises(
            DataError, match="a.jsonl.gz is not a complete gzip file.*copy it again"
        ):
            list(sources.jsonl([path]).documents())
    path.unlink()
    with pytest.raises(FileNotFoundError):
        list(files.read_lines(path))


def test_invalid_paths_are_named(tmp_path):
    with pytest.raises(DataError, match="no input file .*none.txt"):
        sources.text([tmp_path / "none.txt"])
    with pytest.raises(DataError, match="no .txt or .md files under .*: name the files"):
        sources.text([tmp_path])
    with pytest.raises(DataError, match="no .jsonl, .ndjson or .json files under"):
        sources.jsonl([tmp_path])
    with pytest.raises(DataError, match="'file', 'line' or 'paragraph'"):
        sources.text([tmp_path], "word")
    raw = "\ufeffça va? ".encode() * 3 + "café".encode("latin1")
    (tmp_path / "late.txt").write_bytes(raw)
    for document in ("file", "paragraph"):
        with pytest.raises(DataError, match=rf"late.txt is not UTF-8 text \(byte {len(raw) - 1}\)"):
            list(sources.text([tmp_path / "late.txt"], document).documents())
    (tmp_path / "late.txt").unlink()
    (tmp_path / "latin.txt").write_bytes("café".encode("latin1"))
    with pytest.raises(DataError, match=r"latin.txt is not UTF-8 text \(byte 3\).*iconv"):
        list(sources.text([tmp_path]).documents())


def test_hub_dataset_is_streamed(tmp_path):
    pytest.importorskip("datasets")
    write_lines(tmp_path / "train.jsonl", {"body": "one"}, {"body": "two"})
    source = sources.huggingface(str(tmp_path), text_field="body")
    assert list(source.documents()) == ["one", "two"]
    with pytest.raises(DataError, match="no field 'text', only 'body'"):
        list(sources.huggingface(str(tmp_path)).documents())
    with pytest.raises(DataError, match="from the Hugging Face hub .*check the name"):
        list(sources.huggingface(str(tmp_path), split="test").documents())


def test_hub_without_network_is_a_data_error(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def unreachable(*arguments, **options):
        raise ConnectionError("Couldn't reach the Hub\n(Name or service not known)")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError) as caught:
        list(sources.openwebtext().documents())
    assert "Skylion007/openwebtext" in str(caught.value)
    assert "nearlinear data botocore" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_botocore_documents_are_clean_distinct_english():
    texts = list(botocore_docs.botocore_documents())
    assert len(texts) == len(set(texts)) > 10_000
    assert sum(map(len, texts)) > 10e6
    whole = "\n".join(texts)
    assert "<p>" not in whole[:1_000_000] and "</code>" not in whole[:1_000_000]
    assert "&amp;" not in whole[:1_000_000] and "  " not in whole[:1_000_000]
    (bucket,) = [t for t in texts if t.startswith("Amazon Simple Storage Service: CreateBucket\n")]
    assert "\n\nRequest\n\n" in bucket and "Bucket: The name of the bucket to create." in bucket


def test_html_becomes_paragraphs():
    markup = (
        "<p>Use <code>A &lt; B</code> &amp; <i>C</i> .</p>\n <note> <p>Be&nbsp;careful</p> </note>"
        "<ul> <li>one</li><li> <p>two</p> <p/></li></ul>tail &#233;"
    )
    assert botocore_docs.plain_text(markup).split("\n\n") == [
        "Use A < B & C.", "Be careful", "one", "two", "tail é",
    ]  # fmt: skip
    assert botocore_docs.plain_text("") == botocore_docs.plain_text("<p> </p>") == ""


def test_missing_botocore_names_the_package(monkeypatch):
    monkeypatch.setattr(botocore_docs, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install botocore"):
        sources.botocore()


def compressed(path, raw):
    """Write `raw`, compressed by the suffix of the path."""
    suffix = path.suffix.lower()
    if suffix in (".gz", ".bz2", ".xz"):
        raw = {".gz": gzip, ".bz2": bz2, ".xz": lzma}[suffix].compress(raw)
    elif suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(raw) // 2  # two frames, like parallel compressors
        pack = zstandard.ZstdCompressor().compress
        raw = pack(raw[:half]) + pack(raw[half:])
    path.write_bytes(raw)
    return path


@settings(max_examples=40, deadline=None)
@given(
    lines=st.lists(st.binary(max_size=12).map(lambda raw: raw.replace(b"\n", b"\r")), max_size=30),
    end=st.sampled_from([b"", b"\n"]),
    target=st.integers(1, 60),
    chunk=st.integers(1, 40),
)
def test_split_lines_equal_lines_of_the_file(tmp_path_factory, lines, end, target, chunk):
    path = tmp_path_factory.mktemp("d") / "a.txt"
    path.write_bytes(b"\n".join(lines) + end)
    expected = path.read_bytes().split(b"\n")
    inputs = [sources.Input.from_path(path)]
    splits = files.split_by_lines(inputs, target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_CHUNK_BYTES", chunk)
        found = [
            line for split in splits for line in files.read_lines(path, split.start, split.end)
        ]
    assert b"".join(found) == path.read_bytes()
    assert [line.removesuffix(b"\n") for line in found] == expected[: len(found)]
    assert expected[len(found) :] in ([], [b""])
    assert [split.start for split in splits[1:]] == [split.end for split in splits[:-1]]
    assert all(split.end > split.start for split in splits)


def test_skipped_lines_are_located_without_reading_the_file_again(tmp_path, caplog, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{\n' * 100)
    source = sources.jsonl(path, skip_bad_lines=True)
    read, real = [], files.open_file

    def counting(path):
        read.append(path)
        return real(path)

    splits = source.plan(300)
    monkeypatch.setattr(files, "open_file", counting)
    assert [text for split in splits for text in source.read(split)] == ["one"] * 100
    assert len(splits) > 4 and len(read) == len(splits)
    number = 1 + path.read_bytes()[splits[1].start :].split(b"\n").index(b"{")
    assert f"first: {path} (line {number} from byte {splits[1].start}) is not JSON" in caplog.text


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_line_errors_use_line_numbers_of_the_file(tmp_path, name):
    texts = [{"text": f"text {i}"} for i in range(50)]
    raw = b"".join(json.dumps(row).encode() + b"\n" for row in texts) + b"{\n"
    source = sources.jsonl(compressed(tmp_path / name, raw))
    splits = source.plan(100)
    assert len(splits) > 5 if name == "a.jsonl" else splits == [(0, 0, None, splits[0].bytes)]
    found = [text for split in splits[:-1] for text in source.read(split)]
    assert found == [row["text"] for row in texts][: len(found)]
    assert len(found) > 40 or len(splits) == 1
    with pytest.raises(DataError, match=f"{name}:51 is not JSON"):
        list(source.read(splits[-1]))


@pytest.mark.parametrize(("suffix", "kind"), [("zst", "zstd"), ("bz2", "bzip2"), ("xz", "xz")])
def test_corrupt_compression_is_named(tmp_path, suffix, kind):
    path = compressed(tmp_path / f"a.jsonl.{suffix}", b'{"text": "three"}\n' * 1000)
    whole = path.read_bytes()
    for broken in (whole[:-3], b"", b"plain", flipped(whole, 5)):
        path.write_bytes(broken)
        with pytest.raises(
            DataError, match=f"a.jsonl.{suffix} is not a complete {kind} file.*copy it again"
        ):
            list(sources.jsonl(path).documents())


def test_corrupt_parquet_is_named(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet as pq

    path = tmp_path / "a.parquet"
    texts = [f"text {i} {i * i}" for i in range(500)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=100, compression="zstd")
    whole, draw = path.read_bytes(), random.Random(0)
    found = []
    for number in range(120):
        byte = draw.randrange(len(whole))
        cut = number % 4 == 0
        path.write_bytes(whole[:byte] if cut else flipped(whole, byte, number % 8))
        try:
            list(sources.parquet(path).documents())
        except DataError as error:
            assert "a.parquet is damaged or not a Parquet file (" in str(error)
            assert "copy it again" in str(error) and "\n" not in str(error)
            found.append(cut)
    assert sum(found) == 30 and len(found) > 45


def test_parquet_splits_depend_on_the_text_column_only(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet as pq

    texts = [f"{i} " * 100 for i in range(40)]
    meta = [{"a": i, "b": "x" * 1000, "c": [1, 2]} for i in range(40)]
    sizes = []
    for name, columns in (("plain", {}), ("nested", {"meta": meta}), ("list", {"l": [[1]] * 40})):
        table = pa.table(columns | {"text": texts})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=4, use_dictionary=False)
        sizes.append(
            [split.bytes for split in sources.parquet(tmp_path / f"{name}.parquet").plan(1)]
        )
    assert sizes[0] == sizes[1] == sizes[2] and min(sizes[0]) > 1000


def test_parquet_reads_every_type_of_text(tmp_path, caplog):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet as pq

    texts = ["one", "zwei é", "one", "drei"]
    raw = [text.encode() for text in texts]
    columns = {
        "large": pa.array(texts, pa.large_string()),
        "view": pa.array(texts, pa.string_view()),
        "dictionary": pa.array(texts).dictionary_encode(),
        "binary": pa.array(raw, pa.binary()),
        "binary_view": pa.array(raw, pa.binary_view()),
        "latin": pa.array([*raw[:3], "é".encode("latin1")]),
    }
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path)
    for name in list(columns)[:-1]:
        assert list(sources.parquet(path, name).documents()) == texts
    with pytest.raises(DataError, match=r"a.parquet \(row 3 from .*--skip-bad-lines"):
        list(sources.parquet(path, "latin").documents())
    assert list(sources.parquet(path, "latin", skip_bad_lines=True).documents()) == texts[:3]
    assert "skipped 1 rows, the first: " in caplog.text


def test_jsonl_accepts_json_that_only_python_decodes(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", b'{"text": "a \\ud800 b", "n": NaN}', {"text": "c"})
    assert list(sources.jsonl(path).documents()) == ["a \ud800 b", "c"]


def test_parquet_is_split_by_row_groups(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet as pq

    texts = [f"text {i} " * 20 for i in range(100)]
    texts[40] = None
    table = pa.table({"body": texts, "n": range(100)})
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=10)
    pq.write_table(table.slice(0, 5), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"b.parquet \(row 40 from row group 0\) has no text in"):
        list(sources.parquet([tmp_path], "body").documents())
    source = sources.parquet([tmp_path], "body", skip_bad_lines=True)
    splits = source.plan(2000)
    assert [split[:3] for split in splits][:2] == [(0, 0, 1), (1, 0, 2)] and len(splits) == 9
    found = [text for split in splits for text in source.read(split)]
    assert found == texts[:5] + [text for text in texts if text is not None]
    again = sources.rebuild(json.loads(json.dumps(source.spec)))
    assert [text for split in again.plan(2000) for text in again.read(split)] == found
    with pytest.raises(DataError, match="no column 'text', only 'body', 'n': name one"):
        list(sources.parquet([tmp_path]).documents())
    with pytest.raises(DataError, match="int64 in column 'n', not text"):
        sources.parquet([tmp_path], "n")
    (tmp_path / "c.parquet").write_bytes(b"plain")
    with pytest.raises(DataError, match="c.parquet is damaged or not a Parquet file"):
        sources.parquet([tmp_path], "body")


def test_saved_dataset_is_split_by_rows(tmp_path):
    datasets = pytest.importorskip("datasets")
    texts = [f"text {i} " * 5 for i in range(100)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "saved"))
    source = sources.huggingface(str(tmp_path / "saved"))
    splits = source.plan(1000)
    assert len(splits) > 3 and splits[-1].end == 100
    assert [text for split in splits for text in source.read(split)] == texts
    assert source.name == "saved" and list(source.documents()) == texts


def test_hub_dataset_is_split_by_files(tmp_path):
    pytest.importorskip("datasets")
    for number in range(3):
        write_lines(tmp_path / f"train-{number}.jsonl", {"text": f"{number} a"}, {"text": "b"})
    source = sources.huggingface(str(tmp_path))
    found = [list(source.read(split)) for split in source.splits()]
    assert found == [["0 a", "b"], ["1 a", "b"], ["2 a", "b"]]


def test_split_size_grows_with_the_input(monkeypatch, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "one"})
    source = sources.jsonl(path)
    asked = []
    for size in (10**9, 10**12, 10**14):
        inputs = (sources.Input(str(path), size, 0),)
        replace(source, inputs=inputs, plan=lambda target: asked.append(target) or []).splits()
    assert asked == [32 * 2**20, 10**12 // 4096, 256 * 2**20]


@pytest.mark.parametrize(
    "lines, texts",
    [
        (
            b'{"text": "a"} {"text": "b"}\n{"text":\n"c"}\n',
            None,
        ),  # equal counts of objects and lines
        (b'\n{"text": "a"}{"text": "b"}', None),
        (b'{"text": "a"}{"text": "b"}\n\n', None),
        (b'{"m": [{}\n, {}], "text": "a"}\n', None),
        (b'{"m": [{}\n{}], "text": "a"}\n{"text": "b"}\n', None),
        (b'{"text": "a\n{b"}\n', None),
        (b'{"text": "a"}\r\n{"text": "b"}\r\n', ["a", "b"]),
        (b'  {"text": "a"}\n\n\t{"text": "b"} \n', ["a", "b"]),
        (b'{"text": "a}\\n{"}\n{"n": {"text": 1}, "text": "b", "x": [{}]}', ["a}\n{", "b"]),
        (b'{"text": 1, "text": "a"}\n{"t\\u0065xt": "b"}\n', ["a", "b"]),
        (b'{"text": "a", "n": ' + b"[" * 5000 + b"]" * 5000 + b"}\n", None),
    ],
)
def test_jsonl_requires_one_object_per_line(tmp_path, lines, texts):
    """Blocks of lines are decoded at once, and the decoder ignores line ends."""
    for before in (b"", b'{"text": "first"}\n' * 3):
        path = tmp_path / "a.jsonl"
        path.write_bytes(before + lines)
        found = sources.jsonl(path).documents()
        if texts is None:
            with pytest.raises(DataError, match=r"a.jsonl:\d is not JSON"):
                list(found)
        else:
            assert list(found) == ["first"] * (3 if before else 0) + texts


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([
    b'{"text": "a"}', b'{"text":', b'"b"}', b"\n", b"\n", b" ", b"{", b"}", b'{"text": "c}{"}',
    b",", b'{"n": [', b"]", b"\r\n", b'"n": 1, ', b'{"text": "\\ud800"}', b'{"text": null}',
]), max_size=8).map(b"".join))  # fmt: skip
def test_jsonl_blocks_decode_like_single_lines(raw):
    """Compare block decoding with `json.loads` of each line."""
    lines = [line for line in raw.split(b"\n") if line.strip()]
    try:
        expected = [json.loads(line)["text"] for line in lines]
        if set(map(type, expected)) - {str}:
            expected = None
    except (ValueError, KeyError, TypeError):
        expected = None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_bytes(raw)
        try:
            found = list(sources.jsonl(path).documents())
        except DataError:
            found = None
    assert found == expected
