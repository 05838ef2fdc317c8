"""Where text comes from: each function returns a `Source`, a named stream of documents.

A source can be read more than once and yields the same documents in the same order each time.
Its `settings` say what was asked (another answer means another dataset); its `provenance` says
where the text came from. `plain` has those of text files, `tables` those of rows with a field of
text, `hub` those of the Hugging Face hub.
"""

import os
from importlib.metadata import version

from data_prep.places import elsewhere
from data_prep.sources.botocore_docs import botocore_documents, data_folder
from data_prep.sources.hub import huggingface, openwebtext
from data_prep.sources.plain import text
from data_prep.sources.source import Input, Source, Split
from data_prep.sources.tables import jsonl, parquet

__all__ = ["Input", "Source", "Split", "botocore", "botocore_documents", "huggingface", "jsonl",
           "openwebtext", "parquet", "portable", "rebuild", "text"]  # fmt: skip


def botocore() -> Source:
    """The AWS API documentation inside the installed botocore: English text without a network."""
    data_folder()
    return Source(
        name="botocore",
        documents=botocore_documents,
        description="documentation of AWS API operations, from the botocore package (Apache-2.0)",
        provenance={"botocore": version("botocore")},
        spec={"kind": "botocore"},
    )


def rebuild(spec: dict) -> Source:
    """The source with this `spec`, made again: by a worker, on another host, at a resumption."""
    makers = {
        "botocore": botocore,
        "huggingface": huggingface,
        "jsonl": jsonl,
        "parquet": parquet,
        "text": text,
    }
    options = dict(spec)
    return makers[options.pop("kind")](**options)


def portable(spec: dict | None) -> dict | None:
    """A spec that means the same in other folders and on other hosts: its paths are absolute."""
    if spec is None:
        return None

    def absolute(name: str) -> str:
        return os.path.abspath(name) if not elsewhere(name) and os.path.exists(name) else name

    found = {key: list(map(absolute, spec[key])) for key in ("files", "paths") if key in spec}
    return {**spec, **found, **({"name": absolute(spec["name"])} if "name" in spec else {})}
