"""Changed text is detected: while reading, on resumption, and for finished datasets."""

import json
import os
from dataclasses import replace

import pytest

import data_prep
from data_prep import output, plan, resume
from nearlinear.data.format import Manifest
from nearlinear.errors import DataError
from tests.support.preparing import OPTIONS, write_lines

pytestmark = pytest.mark.usefixtures("small_splits")


def stopped(*arguments):
    raise KeyboardInterrupt


def test_finished_output_detects_changed_input(tmp_path, toy_vocab):
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(path)
    prepare = lambda **more: data_prep.prepare(  # noqa: E731
        data_prep.sources.jsonl(path), out, tokenizer=toy_vocab, **OPTIONS, **more
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


def test_prepare_names_input_changed_while_reading(tmp_path, toy_vocab):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_lines(first)
    write_lines(second, seed=1)
    source = data_prep.sources.jsonl([first, second])
    prepare = lambda reader: data_prep.prepare(  # noqa: E731
        replace(source, reader=reader), tmp_path / "out", tokenizer=toy_vocab, **OPTIONS
    )

    def replacing(split):
        for texts in source.read_batches(split):
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

    with pytest.raises(DataError, match="a.jsonl has changed"):  # instead of: is not JSON
        data_prep.prepare(
            replace(data_prep.sources.jsonl([first, second]), reader=cutting),
            tmp_path / "other",
            tokenizer=toy_vocab,
            **OPTIONS,
        )


def test_changes_are_detected_in_every_file_of_a_split(tmp_path, toy_vocab):
    folder = tmp_path / "text"
    folder.mkdir()
    for name in "abcdef":
        (folder / f"{name}.txt").write_text(f"{name} " * 200)
    source = data_prep.sources.text([folder])
    assert len(source.splits()) == 2

    def touching(split):
        yield from source.read_batches(split)
        os.utime(folder / "c.txt", (1, 1))

    with pytest.raises(DataError, match="c.txt has changed"):
        data_prep.prepare(replace(source, reader=touching), tmp_path / "out", tokenizer=toy_vocab,
                          **OPTIONS)  # fmt: skip


def test_custom_source_is_compared_by_its_text(tmp_path, source, toy_vocab, monkeypatch):
    texts = ["a b", "c d", "e f"]
    prepare = lambda texts, **more: data_prep.prepare(  # noqa: E731
        source(texts),
        tmp_path / "out",
        tokenizer=toy_vocab,
        **{**OPTIONS, "val_fraction": 0},
        **more,
    )
    with monkeypatch.context() as patch:
        patch.setattr(output, "merge", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare(texts)
    for other in (["a b", "c d", "e g"], texts[:2], [*texts, "g"]):
        with pytest.raises(DataError, match="unfinished .*different text in input split 0"):
            prepare(other)
    assert prepare(texts).total("documents") == 3
    with pytest.raises(DataError, match="different text in input split 0"):
        prepare([*texts, "g"])
    prepare(texts, max_documents=2, overwrite=True)
    assert prepare(["a b", "c d", "another"], max_documents=2).total("documents") == 2


@pytest.mark.parametrize("limit", [None, 3, 9])
def test_custom_source_with_other_splits_is_refused(tmp_path, toy_vocab, limit):
    """Use splits of one document; splits after a limit are not part of the dataset."""

    def prepare(texts):
        pieces = [data_prep.sources.InputSplit(0, at, at + 1) for at in range(len(texts))]
        source = data_prep.Source("mine", lambda: iter(texts), plan=lambda target: pieces,
                                  reader=lambda piece: iter([[texts[piece.start]]]))  # fmt: skip
        return data_prep.prepare(source, tmp_path / "out", tokenizer=toy_vocab, max_documents=limit,
                                 **{**OPTIONS, "val_fraction": 0})  # fmt: skip

    texts = ["a b", "c d", "e f", "g a"]
    first = prepare(texts)
    assert prepare(texts) == first
    with pytest.raises(DataError, match="other settings .different input splits"):
        prepare(texts[:2])
    if limit == 3:
        assert prepare([*texts, "c"]) == prepare(texts[:3]) == first
    else:
        with pytest.raises(DataError, match="other settings .different input splits"):
            prepare([*texts, "c"])
    with pytest.raises(DataError, match="different text in input split 2"):
        prepare(["a b", "c d", "e e", "g a"])


def test_resume_refuses_splits_of_another_format_version(
    tmp_path, toy_vocab, make_plan, monkeypatch
):
    monkeypatch.setattr(output, "merge", stopped)
    before = make_plan().digest
    prepare = lambda: data_prep.prepare(  # noqa: E731
        data_prep.sources.jsonl(tmp_path / "a.jsonl"),
        tmp_path / "out",
        tokenizer=toy_vocab,
        **OPTIONS,
    )
    with pytest.raises(KeyboardInterrupt):
        prepare()
    for module in (plan, resume):
        monkeypatch.setattr(module, "FORMAT_VERSION", 77)
    assert make_plan().digest != before
    with pytest.raises(DataError, match=r"\(format \d+ -> 77\)"):
        prepare()


def saved(folder, texts):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(folder))


def test_saved_dataset_is_identified_by_fingerprint(tmp_path, toy_vocab, monkeypatch):
    folder, texts = tmp_path / "saved", ["a b", "c d", "e f"]
    saved(folder, texts)
    prepare = lambda **more: data_prep.prepare(  # noqa: E731
        data_prep.sources.huggingface(str(folder)), tmp_path / "out", tokenizer=toy_vocab,
        **OPTIONS, **more
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


def test_dataset_folder_revision_covers_file_times(tmp_path):
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
def test_hub_dataset_is_pinned_to_the_planned_commit(
    tmp_path, toy_vocab, monkeypatch, capsys, commit
):
    """Pin the commit at planning time; note on resumption if the Hub reports none."""
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
        tokenizer=toy_vocab, **{**OPTIONS, "progress": True}
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(output, "merge", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare()
    assert set(asked) == {("someone/texts", commit)}
    capsys.readouterr()
    manifest = prepare()
    note = "note: the text of texts was not compared with the text read before"
    assert (note in capsys.readouterr().out) == (commit is None)
    assert manifest.settings["revision"] == commit
    assert prepare() == manifest and (note in capsys.readouterr().err) == (commit is None)
    if commit:
        commit = "77777"
        match = (
            r"\(revision 5e3b0cc -> 77777\): pass --revision 5e3b0cc to continue with that commit"
        )
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
        with pytest.raises(
            DataError, match=f"{partial} holds .*pass --revision 5e3b0cc to continue"
        ):
            prepare()
        asked.clear()
        assert prepare("5e3b0cc") == manifest and {at for _, at in asked} == {"5e3b0cc"}
        with pytest.raises(DataError, match="revision is 'main': give a commit"):
            prepare("main")


def test_resume_refuses_another_botocore_version(tmp_path, toy_vocab, monkeypatch):
    source = data_prep.sources.botocore
    texts = lambda: iter(["a b", "c d"])  # noqa: E731
    prepare = lambda version: data_prep.prepare(  # noqa: E731
        replace(source(), documents=texts, provenance={"botocore": version}), tmp_path / "out",
        tokenizer=toy_vocab, **OPTIONS
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(output, "merge", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare("1")
    with pytest.raises(DataError, match=r"unfinished .*\(botocore 1 -> 2\)"):
        prepare("2")
    assert prepare("1") == prepare("2")  # a finished dataset only prints a note
