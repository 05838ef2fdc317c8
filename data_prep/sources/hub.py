"""Datasets of the Hugging Face hub, streamed, and those that were saved on this machine."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from data_prep.sources.fields import of_row
from data_prep.sources.source import Source, Split, of_files
from nearlinear.errors import DataError

_OPENWEBTEXT_DOCUMENTS = 8_013_769


def openwebtext() -> Source:
    """OpenWebText, 8 million web pages, about 9 billion GPT-2 tokens, streamed from the hub."""
    return replace(
        huggingface("Skylion007/openwebtext"),
        description="OpenWebText (packaging CC0), https://huggingface.co/datasets/"
        "Skylion007/openwebtext",
        expected_documents=_OPENWEBTEXT_DOCUMENTS,
    )


def huggingface(
    name: str, split: str = "train", config: str | None = None, text_field: str = "text"
) -> Source:
    """A dataset of the Hugging Face hub, streamed: nothing but the shards is kept on disk.

    `name` may also be a folder that `save_to_disk` wrote. Its files are the splits, or runs of
    rows of what was saved. Raises `DataError` when dataset, split or field cannot be had.
    """
    saved = Path(name, "state.json").is_file() or Path(name, "dataset_dict.json").is_file()

    def opened():
        try:
            import datasets
        except ModuleNotFoundError:
            raise DataError(
                f"reading {name} needs the datasets package: run `pip install datasets`, or "
                "prepare text that needs no network with `python -m data_prep botocore`"
            ) from None
        try:
            if not saved:
                return datasets.load_dataset(name, config, split=split, streaming=True)
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

    def read(piece: Split) -> Iterator[str]:
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
            yield of_row(row, text_field, name)

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
    )  # fmt: skip


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
