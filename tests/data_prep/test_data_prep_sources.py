import gzip
import json

import pytest

from data_prep import sources
from data_prep.sources import botocore_docs
from nearlinear.errors import DataError


def write_lines(path, *lines):
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode()
                                for x in lines))  # fmt: skip
    return path


def test_jsonl_plain_and_gzip_in_order(tmp_path):
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
            "a.jsonl:2 has no field 'text', it has 'content', 'id'.*--text-",
        ),
        ({"text": 3}, "a.jsonl:2 has a int in 'text', not text"),
        ({"text": None}, "a.jsonl:2 has a NoneType in 'text'"),
    ],
)
def test_bad_lines_are_named_or_skipped(tmp_path, caplog, line, match):
    path = write_lines(tmp_path / "a.jsonl", {"text": "one"}, line, {"text": "three"})
    with pytest.raises(DataError, match=match):
        list(sources.jsonl([path]).documents())
    assert list(sources.jsonl([path], skip_bad_lines=True).documents()) == ["one", "three"]
    assert "skipped 1 bad lines" in caplog.text and "a.jsonl:2" in caplog.text


def test_truncated_gzip_is_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "three"}\n' * 1000)[:-9])
    with pytest.raises(DataError, match="a.jsonl.gz is not a whole gzip file.*copy it again"):
        list(sources.jsonl([path]).documents())
    path.write_bytes(b"plain")
    with pytest.raises(DataError, match="not a whole gzip file"):
        list(sources.jsonl([path]).documents())


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("file", ["one\ntwo\n\nthree\n", "# four\n"]),
        ("line", ["one", "two", "", "three", "# four"]),
        ("paragraph", ["one\ntwo", "three\n", "# four\n"]),
    ],
)
def test_text_folder(tmp_path, document, expected):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n\nthree\n")
    (tmp_path / "sub/b.md").write_text("# four\n")
    (tmp_path / "c.png").write_bytes(b"\xff")
    assert list(sources.text([tmp_path], document).documents()) == expected


def test_path_errors(tmp_path):
    with pytest.raises(DataError, match="no input file .*none.txt"):
        sources.text([tmp_path / "none.txt"])
    with pytest.raises(DataError, match="no .txt or .md files under"):
        sources.text([tmp_path])
    with pytest.raises(DataError, match="no .jsonl or .jsonl.gz files under"):
        sources.jsonl([tmp_path])
    with pytest.raises(DataError, match="'file', 'line' or 'paragraph'"):
        sources.text([tmp_path], "word")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin1"))
    with pytest.raises(DataError, match=r"latin.txt is not UTF-8 text \(byte 3\).*iconv"):
        list(sources.text([tmp_path]).documents())


def test_hub_dataset_streams(tmp_path):
    pytest.importorskip("datasets")
    write_lines(tmp_path / "train.jsonl", {"body": "one"}, {"body": "two"})
    source = sources.huggingface(str(tmp_path), text_field="body")
    assert list(source.documents()) == ["one", "two"]
    with pytest.raises(DataError, match="no field 'text', it has 'body'"):
        list(sources.huggingface(str(tmp_path)).documents())
    with pytest.raises(DataError, match="from the Hugging Face hub .*check the name"):
        list(sources.huggingface(str(tmp_path), split="test").documents())


def test_no_network_is_a_plain_error(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def unreachable(*arguments, **options):
        raise ConnectionError("Couldn't reach the Hub\n(Name or service not known)")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError) as caught:
        list(sources.openwebtext().documents())
    assert "Skylion007/openwebtext" in str(caught.value)
    assert "python -m data_prep botocore" in str(caught.value)
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


def test_markup_becomes_paragraphs():
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
