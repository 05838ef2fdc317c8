"""A preparation, planned: what is read in which pieces, and everything that decides the shards.

It is written to `job.json` in the folder of the unfinished output, so that any process, on this
host or another, can do any of its splits, and so that a preparation that was stopped goes on.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from data_prep import places
from data_prep.places import Place
from data_prep.sources import Input, Source, Split, portable, rebuild
from data_prep.sources.files import inputs_of
from data_prep.tokenizer import TextTokenizer
from nearlinear.data.format import FORMAT_VERSION, TOKENIZER_FILE
from nearlinear.errors import DataError

JOB_FILE = "job.json"


@dataclass(frozen=True)
class Job:
    """One preparation. `settings` is all that was asked; the splits are of the input as it is."""

    source: Source
    words: TextTokenizer
    settings: dict
    splits: tuple[Split, ...]
    inputs: tuple[Input, ...] = ()

    @classmethod
    def plan(cls, source: Source, words: TextTokenizer, **options) -> "Job":
        """Plan the splits of `source`; `options` are what `prepare` documents."""
        known = {"revision": source.revision()} if source.revision else {}
        if source.spec is not None:
            source = replace(source, spec={**source.spec, **known})
        settings = {
            "source": source.name,
            **source.settings,
            **known,
            "tokenizer_sha256": words.sha256,
            "eos_token": words.eos_token,
            **options,
        }
        return cls(source, words, settings, tuple(source.splits()), source.inputs)

    @property
    def seed(self) -> int:
        return self.settings["seed"]

    @property
    def threshold(self) -> int:
        """Documents whose split hash is below it are held out."""
        return int(self.settings["val_fraction"] * 2**64)

    @property
    def filters(self) -> list[str]:
        """Names of `data_prep.filters.FILTERS`, in order."""
        return self.settings.get("filters", [])

    @cached_property
    def identity(self) -> str:
        """16 hex digits over format, settings and splits: of which job a record is."""
        sizes = [file.bytes for file in self.inputs]
        plain = [FORMAT_VERSION, self.settings, self.splits, sizes]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]

    @contextmanager
    def reading(self, number: int) -> Iterator[None]:
        """Around the reading of a split. Raises `DataError` when a file of it is not as planned."""
        try:
            yield
        except DataError:  # of the text: what it is due to comes first
            self._check_inputs(number)
            raise
        self._check_inputs(number)

    def _check_inputs(self, number: int) -> None:
        """Those of a split: its own, and more before the next split's if it is of several files."""
        first, after = self.splits[number].input, number + 1
        next_first = self.splits[after].input if after < len(self.splits) else len(self.inputs)
        for file in range(first, min(max(next_first, first + 1), len(self.inputs))):
            path = self.source.inputs[file].path
            (now,) = inputs_of(path)
            if now[1:] != self.inputs[file][1:]:  # the path may be told from another folder
                raise DataError(
                    f"{path} has changed since the preparation was planned: run the same command "
                    "again when nothing writes it any more"
                )

    def save(self, folder: Place) -> None:
        """Write it into the folder of the unfinished output, with its tokenizer."""
        self.words.write(folder)
        document = {
            "format": FORMAT_VERSION,
            "settings": self.settings,
            "source": portable(self.source.spec),
            "provenance": self.source.provenance,
            "tokenizer": {"name": self.words.name, "eos_token": self.words.eos_token},
            "inputs": self.inputs,
            "splits": self.splits,
        }
        write_json(folder / JOB_FILE, document)

    @classmethod
    def load(cls, folder: Place) -> "Job":
        """The job of an unfinished output; its source can be read if it has a spec."""
        document = read_json(folder / JOB_FILE)
        if document is None:
            raise DataError(
                f"{folder} holds no {JOB_FILE}: plan it first, with `python -m data_prep prepare`"
            )
        spec, words = document["source"], document["tokenizer"]
        text = (folder / TOKENIZER_FILE).read().decode("utf-8")
        source = Source("memory", lambda: ()) if spec is None else rebuild(spec)
        return cls(
            source,
            TextTokenizer(words["name"], text, words["eos_token"]),
            document["settings"],
            tuple(Split(*split) for split in document["splits"]),
            tuple(Input(*file) for file in document["inputs"]),
        )


def write_json(path: Path | Place, document: dict) -> None:
    """A JSON file that is either absent, as it was, or complete."""
    places.at(path).put(json.dumps(document, ensure_ascii=False).encode())


def read_json(path: Path | Place) -> dict | None:
    """A JSON file; None when there is none that is whole."""
    try:
        return json.loads(places.at(path).read())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
