"""Text that is not the one that was planned, or that was read before, is noticed and named."""

import json
import os
from dataclasses import replace

import pytest

import data_prep
from data_prep import compare, job, output
from nearlinear.data.format import Manifest
from nearlinear.errors import DataError
from tests.support.preparing import OPTIONS, write_lines

pytestmark = pytest.mark.usefixtures("small_splits")


def stopped(*arguments):
    raise KeyboardInterrupt


def test_a_finished_output_is_told_from_another_input(tmp_path, words):
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(path)
    prepare = lambda **more: data_prep.prepare(  # noqa: E731
        data_prep.sources.jsonl(path), out, tokenizer=words, **OPTIONS, **more
    )
    first = prepare()
    os.utime(path, (1, 1))
    assert prepare() == first
    path.rename(tmp_path / "b.jsonl")
    path = tmp_path / "b.jsonl"
    assert prepare() == first
    with pytest.raises(DataError, match=r"\(dedup None -> exact\)"):
        prepare(dedup="exact")
    write_lines(path, seed=1)
    with pytest.raises(DataError, match="input .* -> .* bytes"):
        prepare()
    assert Manifest.read(out) == first and prepare(overwrite=True) != first


def test_an_input_that_changes_meanwhile_is_named(tmp_path, words):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_lines(first)
    write_lines(second, seed=1)
    source = data_prep.sources.jsonl([first, second])
    prepare = lambda reader: data_prep.prepare(  # noqa: E731
        replace(source, reader=reader), tmp_path / "out", tokenizer=words, **OPTIONS
    )

    def replacing(split):
        for texts in source.some(split):
            yield texts
            if split.input == 1 and texts:
                second.write_text(second.read_text().replace("a", "b"))

    with pytest.raises(DataError, match="b.jsonl has changed since the preparation was planned"):
        prepare(replacing)
    done = [json.loads(record.read_text())["split"]
            for record in tmp_path.glob("out.partial/splits/*/record.json")]  # fmt: skip
    assert {source.splits()[number].input for number in done} == {0}

    def cutting(split):
        first.write_text('{"text"')
        raise DataError("a.jsonl:1 is not JSON")
        yield

    with pytest.raises(DataError, match="a.jsonl has changed"):  # not: is not JSON
        data_prep.prepare(
            replace(data_prep.sources.jsonl([first, second]), reader=cutting),
            tmp_path / "other",
            tokenizer=words,
            **OPTIONS,
        )


def test_every_file_of_a_split_of_several_is_looked_at(tmp_path, words):
    folder = tmp_path / "text"
    folder.mkdir()
    for name in "abcdef":
        (folder / f"{name}.txt").write_text(f"{name} " * 200)
    source = data_prep.sources.text([folder])
    assert len(source.splits()) == 2

    def touching(split):
        yield from source.some(split)
        os.utime(folder / "c.txt", (1, 1))

    with pytest.raises(DataError, match="c.txt has changed"):
        data_prep.prepare(replace(source, reader=touching), tmp_path / "out", tokenizer=words,
                          **OPTIONS)  # fmt: skip


def test_texts_of_this_process_alone_are_compared(tmp_path, source, words, monkeypatch):
    texts = ["a b", "c d", "e f"]
    prepare = lambda texts, **more: data_prep.prepare(  # noqa: E731
        source(texts), tmp_path / "out", tokenizer=words, **{**OPTIONS, "val_fraction": 0}, **more
    )
    with monkeypatch.context() as patch:
        patch.setattr(output, "merge", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare(texts)
    for other in (["a b", "c d", "e g"], texts[:2], [*texts, "g"]):
        with pytest.raises(DataError, match="unfinished .*the text of split 0 is another"):
            prepare(other)
    assert prepare(texts).total("documents") == 3
    with pytest.raises(DataError, match="the text of split 0 is another"):
        prepare([*texts, "g"])
    prepare(texts, max_documents=2, overwrite=True)
    assert prepare(["a b", "c d", "another"], max_documents=2).total("documents") == 2


@pytest.mark.parametrize("limit", [None, 3, 9])
def test_a_source_of_ones_own_that_has_other_pieces_is_told(tmp_path, words, limit):
    """Pieces of one document each: a limit that ended the dataset leaves out those after it."""

    def prepare(texts):
        pieces = [data_prep.sources.Split(0, at, at + 1) for at in range(len(texts))]
        source = data_prep.Source("mine", lambda: iter(texts), plan=lambda target: pieces,
                                  reader=lambda piece: iter([[texts[piece.start]]]))  # fmt: skip
        return data_prep.prepare(source, tmp_path / "out", tokenizer=words, max_documents=limit,
                                 **{**OPTIONS, "val_fraction": 0})  # fmt: skip

    texts = ["a b", "c d", "e f", "g a"]
    first = prepare(texts)
    assert prepare(texts) == first
    with pytest.raises(DataError, match="other settings .input of other pieces"):
        prepare(texts[:2])
    if limit == 3:
        assert prepare([*texts, "c"]) == prepare(texts[:3]) == first
    else:
        with pytest.raises(DataError, match="other settings .input of other pieces"):
            prepare([*texts, "c"])
    with pytest.raises(DataError, match="the text of split 2 is another"):
        prepare(["a b", "c d", "e e", "g a"])


def test_splits_of_another_format_are_refused(tmp_path, words, planned, monkeypatch):
    monkeypatch.setattr(output, "merge", stopped)
    before = planned().identity
    prepare = lambda: data_prep.prepare(  # noqa: E731
        data_prep.sources.jsonl(tmp_path / "a.jsonl"), tmp_path / "out", tokenizer=words, **OPTIONS
    )
    with pytest.raises(KeyboardInterrupt):
        prepare()
    for module in (job, compare):
        monkeypatch.setattr(module, "FORMAT_VERSION", 77)
    assert planned().identity != before
    with pytest.raises(DataError, match=r"\(format \d+ -> 77\)"):
        prepare()


def saved(folder, texts):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(folder))


def test_a_saved_dataset_is_known_by_its_fingerprint(tmp_path, words, monkeypatch):
    folder, texts = tmp_path / "saved", ["a b", "c d", "e f"]
    saved(folder, texts)
    prepare = lambda **more: data_prep.prepare(  # noqa: E731
        data_prep.sources.huggingface(str(folder)), tmp_path / "out", tokenizer=words, **OPTIONS,
        **more
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(output, "merge", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare()
    source = data_prep.sources.huggingface(str(folder))
    (spec,) = [json.loads((tmp_path / "out.partial/job.json").read_text())["source"]]
    assert spec["revision"] == source.revision() and len(spec["revision"]) == 16
    saved(folder, texts[::-1])
    with pytest.raises(DataError, match=r"unfinished .*\(revision \w+ -> \w+\): pass --overwr"):
        prepare()
    with pytest.raises(DataError, match="saved has changed since the preparation was planned"):
        list(data_prep.sources.rebuild(spec).documents())
    first = prepare(overwrite=True)
    assert prepare() == first
    saved(folder, texts)
    with pytest.raises(DataError, match=r"other settings \(revision \w+ -> \w+\)"):
        prepare()


def test_files_of_a_folder_that_datasets_reads_are_known(tmp_path):
    pytest.importorskip("datasets")
    folder = tmp_path / "files"
    folder.mkdir()
    write_lines(folder / "train.jsonl")
    known = lambda: data_prep.sources.huggingface(str(folder)).revision()  # noqa: E731
    first = known()
    assert first == known()
    os.utime(folder / "train.jsonl", (1, 1))
    assert first != known()


@pytest.mark.parametrize("commit", ["5e3b0cc", None])
def test_a_dataset_of_the_hub_is_read_at_one_commit(tmp_path, words, monkeypatch, capsys, commit):
    """The one that it is at when it is planned; that none is told is said when it goes on."""
    datasets, hub = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub")
    folder = tmp_path / "files"
    folder.mkdir()
    write_lines(folder / "train.jsonl")
    load, asked = datasets.load_dataset, []

    def loading(name, config, revision, **options):
        asked.append((name, revision))
        return load(str(folder), config, **options)

    class Api:
        def dataset_info(self, name, timeout):
            if commit is None:
                raise ConnectionError
            return hub.DatasetInfo(id=name, sha=commit)

    monkeypatch.setattr(datasets, "load_dataset", loading)
    monkeypatch.setattr(hub, "HfApi", Api)
    prepare = lambda revision=None: data_prep.prepare(  # noqa: E731
        data_prep.sources.huggingface("someone/texts", revision=revision), tmp_path / "out",
        tokenizer=words, **{**OPTIONS, "progress": True}
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(output, "merge", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare()
    assert set(asked) == {("someone/texts", commit)}
    capsys.readouterr()
    manifest = prepare()
    note = "note: the text of texts was not compared with what was read before"
    assert (note in capsys.readouterr().out) == (commit is None)
    assert manifest.settings["revision"] == commit
    assert prepare() == manifest and (note in capsys.readouterr().err) == (commit is None)
    if commit:
        commit = "77777"
        match = r"\(revision 5e3b0cc -> 77777\): pass --revision 5e3b0cc to go on with that commit"
        with pytest.raises(DataError, match=match):
            prepare()
        assert prepare("5e3b0cc") == manifest
        partial = tmp_path / "out.partial"
        (tmp_path / "out").rename(tmp_path / "first")
        commit = "5e3b0cc"
        with monkeypatch.context() as patch:
            patch.setattr(output, "merge", stopped)
            with pytest.raises(KeyboardInterrupt):
                prepare()
        commit = "77777"
        with pytest.raises(DataError, match=f"{partial} holds .*pass --revision 5e3b0cc to go on"):
            prepare()
        asked.clear()
        assert prepare("5e3b0cc") == manifest and {at for _, at in asked} == {"5e3b0cc"}
        with pytest.raises(DataError, match="revision is 'main': give a commit"):
            prepare("main")


def test_another_version_of_botocore_does_not_go_on(tmp_path, words, monkeypatch):
    source = data_prep.sources.botocore
    texts = lambda: iter(["a b", "c d"])  # noqa: E731
    prepare = lambda version: data_prep.prepare(  # noqa: E731
        replace(source(), documents=texts, provenance={"botocore": version}), tmp_path / "out",
        tokenizer=words, **OPTIONS
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(output, "merge", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare("1")
    with pytest.raises(DataError, match=r"unfinished .*\(botocore 1 -> 2\)"):
        prepare("2")
    assert prepare("1") == prepare("2")  # of a finished one it is said
