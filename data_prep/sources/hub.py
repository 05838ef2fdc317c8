"""Datasets of the Hugging Face Hub, streamed, and datasets saved to disk."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from data_prep.sources.source import (
    Input,
    InputSplit,
    Rows,
    Source,
    documents_of_splits,
    value_as_text,
)
from data_prep.sources.tables import get_text
from nearlinear.errors import DataError

_OPENWEBTEXT_DOCUMENTS = 8_013_769
_HUB_TIMEOUT = 10  # seconds


def openwebtext(revision: str | None = None) -> Source:
    """Stream OpenWebText: 8 million web pages, about 9 billion GPT-2 tokens."""
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
    fields: Sequence[str] = (),
) -> Source:
    """Stream a dataset of the Hugging Face Hub; only the token shards are kept on disk.

    Input splits are the dataset's files, or runs of rows of a dataset saved to disk.

    Args:
        name: Dataset on the Hub, or a folder written by `save_to_disk`.
        revision: Commit on the Hub, or fingerprint of a folder. By default the current one, which
            is then used for all input splits.
        text_field: Field that holds the document.
        fields: Other fields to keep with each document.

    Raises:
        DataError: The dataset, split or field is missing, a folder has another fingerprint than
            `revision`, or `revision` is a branch or a tag.
    """
    is_folder = Path(name).is_dir()
    if revision and not is_folder and not re.fullmatch("[0-9a-f]+", revision):
        raise DataError(
            f"revision is {revision!r}: give a commit hash from the Hub; branches and tags move"
        )
    saved = Path(name, "state.json").is_file() or Path(name, "dataset_dict.json").is_file()

    @cache
    def pinned_revision() -> str | None:
        return revision or (_folder_revision(name, split) if is_folder else _hub_revision(name))

    def open_dataset() -> Any:
        try:
            import datasets
        except ModuleNotFoundError:
            raise DataError(
                f"reading {name} needs the datasets package: run `pip install datasets`, or "
                "prepare text that needs no network with `nearlinear data botocore`"
            ) from None
        commit = pinned_revision()
        if is_folder and _folder_revision(name, split) != commit:
            raise DataError(
                f"{name} has changed since the preparation was planned: run the same command again "
                "when no process writes to it"
            )
        try:
            if not saved:
                return datasets.load_dataset(
                    name,
                    config,
                    split=split,
                    streaming=True,
                    revision=None if is_folder else commit,
                )
            found = datasets.load_from_disk(name)
            return found if isinstance(found, datasets.Dataset) else found[split]
        except Exception as error:  # the Hub client raises many types
            raise _hub_error(name, error) from error

    def plan(target: int) -> list[InputSplit]:
        dataset = open_dataset()
        if not saved:
            return [InputSplit(0, number, number + 1) for number in range(dataset.num_shards)]
        rows, size = len(dataset), max(dataset.data.nbytes, 1)
        step = max(rows * target // size, 1)
        return [
            InputSplit(0, start, min(start + step, rows), min(step, rows - start) * size // rows)
            for start in range(0, rows, step)
        ]

    def read(piece: InputSplit, kept: Rows | None = None) -> Iterator[list[str]]:
        dataset = open_dataset()
        if saved:
            assert piece.end is not None, "a split of a saved dataset names its last row"
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
            text = get_text(row, text_field, name)
            if kept is not None:
                kept.append(tuple(value_as_text(row.get(field)) for field in fields))
            yield [text]

    return Source(
        name=name.rstrip("/").rsplit("/", 1)[-1],
        documents=documents_of_splits(plan, read),
        description=f"https://huggingface.co/datasets/{name}" if not saved else name,
        settings={"dataset": name, "config": config, "split": split, "text_field": text_field},
        provenance={"datasets": _package_version("datasets")},
        plan=plan,
        reader=read,
        spec={"kind": "huggingface", "name": name, "split": split, "config": config,
              "text_field": text_field},
        fields=tuple(fields),
        revision=pinned_revision,
    )  # fmt: skip


def _hub_revision(name: str) -> str | None:
    """Return the current commit of a Hub dataset, or None if the Hub does not answer."""
    try:
        from huggingface_hub import HfApi

        return HfApi().dataset_info(name, timeout=_HUB_TIMEOUT).sha
    except Exception:  # many types; reading the dataset reports the cause
        return None


def _folder_revision(name: str, split: str) -> str:
    """Return the fingerprint stored by `datasets`, or a hash of file names, sizes and times."""
    for state in (Path(name, "state.json"), Path(name, split, "state.json")):
        if state.is_file():
            return json.loads(state.read_text(encoding="utf-8"))["_fingerprint"]
    files = sorted(path for path in Path(name).rglob("*") if path.is_file())
    known = [[str(path.relative_to(name)), *Input.from_path(path)[1:]] for path in files]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def _hub_error(name: str, error: Exception) -> DataError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return DataError(
        f"cannot read {name} from the Hugging Face hub ({reason}): check the name and the network, "
        "or prepare text that needs no network with `nearlinear data botocore`"
    )


def _package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
