"""WebDataset archives: samples as of the webdataset library, and nothing lost in silence."""

import gzip
import io
import json
import tarfile

import pytest

import data_prep
from data_prep import sources
from nearlinear.data.format import Manifest
from nearlinear.errors import DataError

SAMPLES = [
    ("crawl/0001", {"jpg": b"\xff\xd8" * 700, "txt": b"ein Bild", "url": b"https://a/1"}),
    ("crawl/0002", {"TXT": b"\xef\xbb\xbftwo", "meta.json": b'{"text": "other", "n": 2}'}),
    ("0003", {"txt": b"", "url": b"https://a/3"}),
    ("v1.5/0004", {"txt": b"four\n" * 300, "meta.json": b'{"text": "vier", "n": [4]}'}),
]
TEXTS = ["ein Bild", "two", "", "four\n" * 300]


def archive(*members) -> bytes:
    """Return a tar archive of (name, content) pairs; a content of None is a link."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.linkname = tarfile.SYMTYPE, "elsewhere"
            member.size = len(content or b"")
            tar.addfile(member, io.BytesIO(content or b""))
    return raw.getvalue()


def members_of(samples):
    return [(f"{key}.{name}", raw) for key, sample in samples for name, raw in sample.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two archives, the second one compressed, with metadata and a folder that are no samples."""
    folder = tmp_path_factory.mktemp("shards")
    first = archive(("__index__", b"{}"), *members_of(SAMPLES[:2]))
    (folder / "a.tar").write_bytes(first)
    (folder / "b.tar.gz").write_bytes(gzip.compress(archive(*members_of(SAMPLES[2:]))))
    return folder


def test_samples_are_read_in_order_with_fields(folder):
    source = sources.webdataset([folder], fields=("__key__", "url", "META.json"))
    (split,) = source.splits()
    rows = []
    assert [text for texts in source.read_batches(split, rows) for text in texts] == TEXTS
    assert rows == [
        ("crawl/0001", "https://a/1", None),
        ("crawl/0002", None, '{"text": "other", "n": 2}'),
        ("0003", "https://a/3", None),
        ("v1.5/0004", None, '{"text": "vier", "n": [4]}'),
    ]
    assert list(sources.rebuild(source.spec).documents()) == TEXTS
    by_input = source.split_by_input(split)
    assert [list(source.read(each)) for each in by_input] == [TEXTS[:2], TEXTS[2:]]


def test_samples_equal_those_of_the_library(folder):
    webdataset = pytest.importorskip("webdataset")
    theirs = webdataset.WebDataset(sorted(map(str, folder.iterdir())), shardshuffle=False)
    source = sources.webdataset([folder], fields=("__key__",))
    rows = []
    ours = [each for texts in source.read_batches(source.splits()[0], rows) for each in texts]
    expected = [(each["__key__"], each["txt"].decode("utf-8-sig")) for each in theirs]
    assert [(key, text) for (key,), text in zip(rows, ours, strict=True)] == expected


def test_json_members(tmp_path):
    with_json = [sample for sample in SAMPLES if "meta.json" in sample[1]]
    (tmp_path / "a.tar").write_bytes(archive(*members_of(with_json)))
    source = sources.webdataset(tmp_path, text_member="meta.json")
    assert list(source.documents()) == ["other", "vier"]
    source = sources.webdataset(tmp_path, text_member="meta.json", text_field="n")
    with pytest.raises(DataError, match=r"'meta.json' of sample 'crawl/0002' of .*a int in field"):
        list(source.documents())


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ([("x.json", b"{}")], "sample 'x' of .* has no member 'txt', only 'json': .*--text-member"),
        ([("x.txt", b"\xff")], "'txt' of sample 'x' .*not UTF-8 text .byte 0"),
        ([("README", b"x")], "README has no extension: remove it"),
        ([("d/._x.txt", b"x")], "d/._x.txt has no extension"),
        ([("x.txt", None)], r"x.txt has no content of its own \(a link"),
        ([("x.txt", b"1"), ("x.TXT", b"2")], "sample 'x' of .* has two members 'txt'"),
        ([("x.txt", b"1"), ("y.txt", b"2"), ("x.url", b"3")], "sample 'x' .* only 'url'"),
    ],
)
def test_bad_samples_are_named_or_skipped(tmp_path, caplog, members, match):
    around = [("first.txt", b"first")], [("last.txt", b"last")]
    (tmp_path / "a.tar").write_bytes(archive(*around[0], *members, *around[1]))
    with pytest.raises(DataError, match=match + ".*--skip-bad-lines"):
        list(sources.webdataset(tmp_path).documents())
    read = list(sources.webdataset(tmp_path, skip_bad_lines=True).documents())
    good = ["1", "2"] if len(members) == 3 else []
    assert read == ["first", *good, "last"]
    assert "skipped 1 bad samples" in caplog.text


def test_archive_cut_anywhere_is_an_error(tmp_path):
    """The library and tarfile take a file that is cut between two members for a complete one."""
    raw = archive(*members_of(SAMPLES))
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        ends = [member.offset for member in tar][1:]
    end_marker = max(
        each for each in range(0, len(raw), 512) if raw[each : each + 512].strip(b"\0")
    )
    ends.append(end_marker + 512)
    path = tmp_path / "a.tar"
    for cut in sorted({0, 100, *ends, *(end - 100 for end in ends), *(end + 7 for end in ends)}):
        path.write_bytes(raw[:cut])
        with pytest.raises(DataError, match="a.tar is no complete tar archive .*: copy"):
            list(sources.webdataset(path).documents())
    for header in ends[:-1]:  # damage within the archive
        path.write_bytes(raw[:header] + b"x" + raw[header + 1 :])
        with pytest.raises(DataError, match="a.tar is no complete tar archive .bad checksum"):
            list(sources.webdataset(path).documents())
    path.write_bytes(raw[: end_marker + 1024])
    assert list(sources.webdataset(path).documents()) == TEXTS


def test_joined_archives_are_an_error(tmp_path):
    (tmp_path / "a.tar").write_bytes(archive(*members_of(SAMPLES[:2])) * 2)
    with pytest.raises(DataError, match=r"a.tar goes on after the end of its archive.*separate"):
        list(sources.webdataset(tmp_path).documents())


def test_other_files_are_no_archives(tmp_path):
    (tmp_path / "a.tar").write_text('{"text": "x"}\n' * 99)
    with pytest.raises(DataError, match="a.tar is no complete tar archive"):
        list(sources.webdataset(tmp_path).documents())
    (tmp_path / "a.tar").rename(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"no .tar files under .*a.jsonl \(not .tar\)"):
        sources.webdataset(tmp_path)


def test_preparation_by_workers_and_command_line(folder, tmp_path, capsys):
    from data_prep.__main__ import main

    with_text = [text for text in TEXTS if text]  # an empty document is left out
    lines = "".join(json.dumps({"text": text}) + "\n" for text in with_text)
    (tmp_path / "one.jsonl").write_text(lines)
    expected = data_prep.prepare(
        sources.jsonl(tmp_path / "one.jsonl"), tmp_path / "expected", progress=False, val_fraction=0
    )
    command = ["webdataset", str(folder), "--out", str(tmp_path / "out"), "--val-fraction", "0"]
    assert main([*command, "--keep-fields", "__key__", "--workers", "2"]) == 0
    manifest = Manifest.read(tmp_path / "out")
    assert manifest.total("documents") == expected.total("documents")
    shards = [sorted((tmp_path / each).rglob("*.bin")) for each in ("out", "expected")]
    assert [each.read_bytes() for each in shards[0]] == [each.read_bytes() for each in shards[1]]
    assert shards[0]
    capsys.readouterr()
    assert main(["find", str(tmp_path / "out"), "ein Bild"]) == 0
    assert "a.tar:1" in capsys.readouterr().out
    assert main(["why", str(tmp_path / "out"), "b.tar.gz:2"]) == 0
    assert "v1.5/0004" in capsys.readouterr().out
