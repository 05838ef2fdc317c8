"""Text sources. Each function returns a `Source`, a named and repeatable stream of documents.

A source yields the same documents in the same order each time. `text_files` reads plain text,
`tables` JSON lines and Parquet, `archives` WebDataset, `hub` datasets of the Hugging Face Hub.
"""

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from data_prep.sources.archives import webdataset
from data_prep.sources.botocore_docs import botocore_documents, data_folder
from data_prep.sources.conversations import chat, preference
from data_prep.sources.hub import huggingface, openwebtext
from data_prep.sources.source import Input, InputSplit, Source, UnreadInput
from data_prep.sources.tables import jsonl, parquet
from data_prep.sources.text_files import text
from data_prep.storage_paths import is_remote

__all__ = ["Input", "InputSplit", "Source", "UnreadInput", "botocore", "botocore_documents",
           "chat", "huggingface", "jsonl", "openwebtext", "parquet", "portable", "preference",
           "rebuild", "text", "webdataset"]  # fmt: skip


def botocore() -> Source:
    """Return the AWS API documentation in the installed botocore: English without a network."""
    data_folder()
    return Source(
        name="botocore",
        documents=botocore_documents,
        description="documentation of AWS API operations, from the botocore package (Apache-2.0)",
        provenance={"botocore": version("botocore")},
        spec={"kind": "botocore"},
    )


def rebuild(spec: dict[str, Any]) -> Source:
    """Recreate a source from its `spec`, in a worker, on another host, or on resumption."""
    makers: dict[str, Callable[..., Source]] = {
        "botocore": botocore,
        "chat": chat,
        "huggingface": huggingface,
        "jsonl": jsonl,
        "parquet": parquet,
        "preference": preference,
        "text": text,
        "webdataset": webdataset,
    }
    options = dict(spec)
    return makers[options.pop("kind")](**options)


def portable(spec: dict[str, Any] | None) -> dict[str, Any] | None:
    """Make the paths of a spec absolute, so that it works in any folder and on any host."""
    if spec is None:
        return None

    def absolute(name: str) -> str:
        return os.path.abspath(name) if not is_remote(name) and os.path.exists(name) else name

    found = {key: list(map(absolute, spec[key])) for key in ("files", "paths") if key in spec}
    return {**spec, **found, **({"name": absolute(spec["name"])} if "name" in spec else {})}
