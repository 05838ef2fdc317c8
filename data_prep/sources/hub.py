"""Datasets of the Hugging Face hub, streamed, and those that were saved on this machine."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from data_prep.sources.fields import of_row
from data_prep.sources.source import Input, Source, Split, of_files
from nearlinear.errors import DataError

_OPENWEBTEXT_DOCUMENTS = 8_013_769
_SECONDS_FOR_HUB = 10


def openwebtext(revision: str | None = None) -> Source:
    """OpenWebText, 8 million web pages, about 9 billion GPT-2 tokens, streamed from the hub."""
    return replace(
        huggingface("Skylion007/openwebtext", revision=revision),
        description="OpenWebText (packaging CC0), https://huggingface.co/datasets/"
        "Skylion007/openwebtext",
        expected_documents=_OPENWEBTEXT_DOCUMENTS,
    )


def huggingface(
    name: str,
    split: str = "train",
    config: str | None = None,
    text_field: str = "text",
    revision: str | None = None,
) -> Source:
    """A dataset of the Hugging Face hub, streamed: nothing but the shards is kept on disk.

    `name` may also be a folder that `save_to_disk` wrote. Its files are the splits, or runs of
    rows of what was saved. `revision` is the commit of the hub, or what a folder's text is known
    by (default: that of now, which all splits are read from). Raises `DataError` when dataset,
    split or field cannot be had, when a folder is not of the revision, and for a branch or a tag.
    """
    here = Path(name).is_dir()
    if revision and not here and not re.fullmatch("[0-9a-f]+", revision):
        raise DataError(
            f"revision is {revision!r}: give a commit, as the hub shows it; a branch or a tag moves"
        )
    saved = Path(name, "state.json").is_file() or Path(name, "dataset_dict.json").is_file()

    @cache
    def pinned() -> str | None:
        return revision or (_of_folder(name, split) if here else _of_hub(name))

    def opened():
        try:
            import datasets
        except ModuleNotFoundError:
            raise DataError(
                f"reading {name} needs the datasets package: run `pip install datasets`, or "
                "prepare text that needs no network with `python -m data_prep botocore`"
            ) from None
        commit = pinned()
        if here and _of_folder(name, split) != commit:
            raise DataError(
                f"{name} has changed since the preparation was planned: run the same command again "
                "when nothing writes it any more"
            )
        try:
            if not saved:
                return datasets.load_dataset(
                    name, config, split=split, streaming=True, revision=None if here else commit
                )
            found = datasets.load_from_disk(name)
            return found if isinstance(found, datasets.Dataset) else found[split]
        except Exception as error:  # the hub's client raises many kinds
            raise _hub_error(name, error) from error

    def plan(target: int) -> list[Split]:
        dataset = opened()
        if not saved:
            return [Split(0, number, number + 1) for number in range(dataset.num_shards)]
        rows, size = len(dataset), max(dataset.data.nbytes, 1)
        step = max(rows * target // size, 1)
        return [Split(0, start, min(start + step, rows), min(step, rows - start) * size // rows)
                for start in range(0, rows, step)]  # fmt: skip

    def read(piece: Split) -> Iterator[list[str]]:
        dataset = opened()
        if saved:
            dataset = dataset.select(range(piece.start, piece.end))
        else:
            dataset = dataset.shard(num_shards=dataset.num_shards, index=piece.start)
        rows = iter(dataset)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:
                raise _hub_error(name, error) from error
            yield [of_row(row, text_field, name)]

    return Source(
        name=name.rstrip("/").rsplit("/", 1)[-1],
        documents=of_files(plan, read),
        description=f"https://huggingface.co/datasets/{name}" if not saved else name,
        settings={"dataset": name, "config": config, "split": split, "text_field": text_field},
        provenance={"datasets": _version("datasets")},
        plan=plan,
        reader=read,
        spec={"kind": "huggingface", "name": name, "split": split, "config": config,
              "text_field": text_field},
        revision=pinned,
    )  # fmt: skip


def _of_hub(name: str) -> str | None:
    """The commit that a dataset of the hub is at; None when the hub does not say."""
    try:
        from huggingface_hub import HfApi

        return HfApi().dataset_info(name, timeout=_SECONDS_FOR_HUB).sha
    except Exception:  # of many kinds; reading the dataset tells what is wrong
        return None


def _of_folder(name: str, split: str) -> str:
    """What the text of a folder is known by: the fingerprint with which `datasets` saved it, else
    a hash of its files' names, sizes and times.
    """
    for state in (Path(name, "state.json"), Path(name, split, "state.json")):
        if state.is_file():
            return json.loads(state.read_text(encoding="utf-8"))["_fingerprint"]
    files = sorted(path for path in Path(name).rglob("*") if path.is_file())
    known = [[str(path.relative_to(name)), *Input.of(path)[1:]] for path in files]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def _hub_error(name: str, error: Exception) -> DataError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return DataError(
        f"cannot read {name} from the Hugging Face hub ({reason}): check the name and the network, "
        "or prepare text that needs no network with `python -m data_prep botocore`"
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
