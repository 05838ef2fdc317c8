"""Where text comes from: each function returns a `Source`, a named stream of documents.

A source can be read more than once and yields the same documents in the same order each time.
Its `settings` say what was asked (another answer means another dataset); its `provenance` says
where the text came from. Files are told apart by their contents, not by name or date.
"""

import gzip
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from data_prep.botocore_docs import botocore_documents, data_folder
from nearlinear.errors import DataError

__all__ = ["Source", "botocore", "botocore_documents", "huggingface", "jsonl", "openwebtext",
           "text"]  # fmt: skip

logger = logging.getLogger("data_prep")

_TEXT_SUFFIXES = (".txt", ".md")
_OPENWEBTEXT_DOCUMENTS = 8_013_769


@dataclass(frozen=True)
class Source:
    """A stream of documents: `documents()` starts it anew and yields one string per document."""

    name: str
    documents: Callable[[], Iterable[str]]
    description: str = ""
    settings: dict = field(default_factory=dict)
    provenance: dict = field(default_factory=dict)
    expected_documents: int | None = None
    expected_bytes: int | None = None


def botocore() -> Source:
    """The AWS API documentation inside the installed botocore: English text without a network."""
    data_folder()
    return Source(
        name="botocore",
        documents=botocore_documents,
        description="documentation of AWS API operations, from the botocore package (Apache-2.0)",
        provenance={"botocore": version("botocore")},
    )


def openwebtext() -> Source:
    """OpenWebText, 8 million web pages, about 9 billion GPT-2 tokens, streamed from the hub."""
    hub = huggingface("Skylion007/openwebtext")
    return Source(
        name="openwebtext",
        documents=hub.documents,
        description="OpenWebText (packaging CC0), https://huggingface.co/datasets/"
        "Skylion007/openwebtext",
        settings=hub.settings,
        provenance=hub.provenance,
        expected_documents=_OPENWEBTEXT_DOCUMENTS,
    )


def huggingface(
    name: str, split: str = "train", config: str | None = None, text_field: str = "text"
) -> Source:
    """A dataset of the Hugging Face hub, streamed: nothing but the shards is kept on disk.

    Raises `DataError` when the dataset, the split or the field cannot be had.
    """

    def documents() -> Iterator[str]:
        try:
            from datasets import load_dataset
        except ModuleNotFoundError:
            raise DataError(
                f"reading {name} needs the datasets package: run `pip install datasets`, or "
                "prepare text that needs no network with `python -m data_prep botocore`"
            ) from None
        try:
            rows = iter(load_dataset(name, config, split=split, streaming=True))
        except Exception as error:  # the hub's client raises many kinds
            raise _hub_error(name, error) from error
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:
                raise _hub_error(name, error) from error
            yield _text_of(row, text_field, name, "")

    return Source(
        name=name.rsplit("/", 1)[-1],
        documents=documents,
        description=f"https://huggingface.co/datasets/{name}",
        settings={"dataset": name, "config": config, "split": split, "text_field": text_field},
        provenance={"datasets": _version("datasets")},
    )


def jsonl(
    files: Sequence[str | Path], text_field: str = "text", skip_bad_lines: bool = False
) -> Source:
    """JSON lines (`.jsonl`, `.jsonl.gz`): one object per line, its `text_field` is the document.

    Raises `DataError` naming file and line for a line that is not such an object; with
    `skip_bad_lines` those are left out and counted in one warning.
    """
    paths = _existing_files(files)

    def documents() -> Iterator[str]:
        skipped = []
        for path in paths:
            for number, line in enumerate(_lines(path), 1):
                if not line.strip():
                    continue
                try:
                    yield _document_of_line(line, text_field, f"{path}:{number}")
                except DataError as error:
                    if not skip_bad_lines:
                        raise
                    skipped.append(error) if not skipped else skipped.append(None)
        if skipped:
            logger.warning("skipped %d bad lines, the first: %s", len(skipped), skipped[0])

    return Source(
        name="jsonl",
        documents=documents,
        description=_describe(paths),
        settings={"text_field": text_field, "skip_bad_lines": skip_bad_lines,
                  "input_sha256": _contents_sha256(paths)},
        expected_bytes=_plain_size(paths),
    )  # fmt: skip


def text(paths: Sequence[str | Path], document: str = "file") -> Source:
    """Plain UTF-8 text: files, and folders searched for `.txt` and `.md` files.

    `document` says what one document is: a whole "file", a "line", or a "paragraph" (text between
    blank lines). Raises `DataError` for missing paths and for files that are not UTF-8.
    """
    if document not in ("file", "line", "paragraph"):
        raise DataError(f"document is {document!r}: use 'file', 'line' or 'paragraph'")
    files = _existing_files(paths, folders=True)

    def documents() -> Iterator[str]:
        for path in files:
            if document == "file":
                yield _decoded(path.read_bytes(), path)
            elif document == "line":
                for line in _lines(path):
                    yield _decoded(line, path).rstrip("\r\n")
            else:
                yield from re.split(r"\n\s*\n", _decoded(path.read_bytes(), path))

    return Source(
        name="text",
        documents=documents,
        description=_describe(files),
        settings={"document": document, "input_sha256": _contents_sha256(files)},
        expected_bytes=_plain_size(files),
    )


def _document_of_line(line: bytes, text_field: str, where: str) -> str:
    go_on = "mend the line, or pass --skip-bad-lines to leave such lines out"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}): {go_on}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is JSON but not an object: {go_on}")
    return _text_of(row, text_field, where, f"; {go_on}")


def _text_of(row: dict, text_field: str, where: str, go_on: str) -> str:
    if text_field not in row:
        raise DataError(
            f"{where} has no field {text_field!r}, it has {', '.join(map(repr, row)) or 'none'}: "
            f"name one with --text-field{go_on}"
        )
    if not isinstance(row[text_field], str):
        kind = type(row[text_field]).__name__
        raise DataError(
            f"{where} has a {kind} in {text_field!r}, not text: name another field with "
            f"--text-field{go_on}"
        )
    return row[text_field]


def _existing_files(paths: Sequence[str | Path], folders: bool = False) -> list[Path]:
    """The files meant by `paths`, a folder's in sorted order."""
    files: list[Path] = []
    for path in map(Path, [paths] if isinstance(paths, (str, Path)) else paths):
        if path.is_dir() and folders:
            found = [p for p in path.rglob("*") if p.suffix in _TEXT_SUFFIXES and p.is_file()]
            if not found:
                raise DataError(f"no .txt or .md files under {path}: name the files themselves")
            files += sorted(found)
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"no input file {path}: check the path")
    if not files:
        raise DataError("no input files were named: give at least one")
    return files


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            yield from file
    except (gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}): copy it again") from None


def _decoded(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.start}): convert it, for example with "
            f"`iconv -f latin1 -t utf-8`"
        ) from None


def _contents_sha256(paths: list[Path]) -> str:
    size = sum(path.stat().st_size for path in paths)
    if size > 1024**3:
        logger.warning("reading %.1f GiB of input once to identify it", size / 1024**3)
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _plain_size(paths: list[Path]) -> int | None:
    if any(path.suffix == ".gz" for path in paths):
        return None
    return sum(path.stat().st_size for path in paths)


def _describe(paths: list[Path]) -> str:
    names = ", ".join(path.name for path in paths[:3])
    return names if len(paths) <= 3 else f"{names} and {len(paths) - 3} more files"


def _hub_error(name: str, error: Exception) -> DataError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return DataError(
        f"cannot read {name} from the Hugging Face hub ({reason}): check the name and the network, "
        "or prepare text that needs no network with `python -m data_prep botocore`"
    )


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError

    try:
        return version(package)
    except PackageNotFoundError:
        return None
