"""The plan of a preparation: its input splits, and every setting that determines the shards.

The plan is written to `job.json` in the folder of the unfinished output, so that any process on
any host can process any of its splits, and a stopped preparation can resume.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from data_prep.chat import ChatTokenizer, tokenizer_of
from data_prep.sources import Input, InputSplit, Source, UnreadInput, portable, rebuild
from data_prep.sources.files import stat_input
from data_prep.storage_paths import read_json, write_json
from data_prep.tokenizer import TextTokenizer
from nearlinear.data.format import FORMAT_VERSION, TOKENIZER_FILE
from nearlinear.errors import DataError
from nearlinear.storage import StoragePath

if TYPE_CHECKING:
    from data_prep.decontaminate import EvaluationSets

PLAN_FILE, EVALUATION_FILE = "job.json", "evaluation_sets.npz"
_RECORD_VERSION = 2
"""Version of the files of a finished split: those of another one are not used."""


@dataclass(frozen=True)
class PreparationPlan:
    """A planned preparation of one source."""

    source: Source
    tokenizer: TextTokenizer
    settings: dict[str, Any]
    """Every option that changes the dataset, as stored in the manifest."""
    splits: tuple[InputSplit, ...]
    """Input splits, for the input as it was when the plan was made."""
    inputs: tuple[Input, ...] = ()
    unread: tuple[UnreadInput, ...] = ()
    evaluation_sets: "EvaluationSets | None" = None

    @classmethod
    def create(
        cls,
        source: Source,
        tokenizer: TextTokenizer,
        evaluation_sets: "EvaluationSets | None" = None,
        **options: Any,
    ) -> "PreparationPlan":
        """Plan the input splits of `source`; `options` are those of `prepare`."""
        known: dict[str, Any] = {"revision": source.revision()} if source.revision else {}
        if source.fields:
            known["fields"] = [*source.fields]
        if source.spec is not None:
            source = replace(source, spec={**source.spec, **known})
        settings = {
            "source": source.name,
            **source.settings,
            **known,
            "tokenizer_sha256": tokenizer.sha256,
            "eos_token": tokenizer.eos_token,
            **options,
        }
        tokenizer = tokenizer_of(source, tokenizer)
        if isinstance(tokenizer, ChatTokenizer):
            template = tokenizer.chat_template.encode()
            settings["chat_template_sha256"] = hashlib.sha256(template).hexdigest()
        if evaluation_sets is not None:
            settings["evaluation_sets"] = evaluation_sets.settings
        splits = tuple(source.splits())
        return cls(
            source, tokenizer, settings, splits, source.inputs, source.unread, evaluation_sets
        )

    @property
    def seed(self) -> int:
        return self.settings["seed"]

    @cached_property
    def bos_id(self) -> int | None:
        """Id written before every document, or None."""
        token = self.settings.get("bos_token")
        return None if token is None else self.tokenizer.tokenizer.token_to_id(token)

    @property
    def val_threshold(self) -> int:
        """Documents with a split hash below this value are held out for validation."""
        return int(self.settings["val_fraction"] * 2**64)

    @property
    def filters(self) -> list[str]:
        """Names of the quality filters (`data_prep.documents.FILTERS`), in order."""
        return self.settings.get("filters", [])

    @cached_property
    def digest(self) -> str:
        """16 hex digits that identify formats, settings and input splits in split records."""
        sizes = [file.bytes for file in self.inputs]
        document = [FORMAT_VERSION, _RECORD_VERSION, self.settings, self.splits, sizes]
        return hashlib.sha256(json.dumps(document).encode()).hexdigest()[:16]

    @contextmanager
    def check_unchanged(self, number: int) -> Iterator[None]:
        """Raise `DataError` if a file of input split `number` changed since the plan was made."""
        try:
            yield
        except DataError:  # a change of the file explains errors in its text
            self._check_inputs(number)
            raise
        self._check_inputs(number)

    def _check_inputs(self, number: int) -> None:
        # A split of several files ends before the first file of the next split.
        first, after = self.splits[number].input, number + 1
        next_first = self.splits[after].input if after < len(self.splits) else len(self.inputs)
        for file in range(first, min(max(next_first, first + 1), len(self.inputs))):
            path = self.source.inputs[file].path
            current = stat_input(path)
            if current[1:] != self.inputs[file][1:]:  # the path may be relative to another folder
                raise DataError(
                    f"{path} has changed since the preparation was planned: run the same command "
                    "again when no process writes to the file"
                )

    def save(self, folder: StoragePath) -> None:
        """Write the plan and all that it needs to the folder of the unfinished output."""
        self.tokenizer.write(folder)
        if self.evaluation_sets is not None:
            (folder / EVALUATION_FILE).put(self.evaluation_sets.to_bytes())
        document = {
            "format": FORMAT_VERSION,
            "settings": self.settings,
            "source": portable(self.source.spec),
            "provenance": self.source.provenance,
            "tokenizer": {
                "name": self.tokenizer.name,
                "eos_token": self.tokenizer.eos_token,
                "config": self.tokenizer.config,
            },
            "inputs": self.inputs,
            "unread": self.unread,
            "splits": self.splits,
        }
        write_json(folder / PLAN_FILE, document)

    @classmethod
    def load(cls, folder: StoragePath) -> "PreparationPlan":
        """Read the plan of an unfinished output. A source without a spec becomes empty."""
        document = read_json(folder / PLAN_FILE)
        if document is None:
            raise DataError(f"{folder} holds no {PLAN_FILE}: start with `nearlinear data prepare`")
        spec, tokenizer = document["source"], document["tokenizer"]
        text = (folder / TOKENIZER_FILE).read().decode("utf-8")
        source = Source("memory", lambda: ()) if spec is None else rebuild(spec)
        words = TextTokenizer(
            tokenizer["name"], text, tokenizer["eos_token"], tokenizer.get("config", "{}")
        )
        sets = document["settings"].get("evaluation_sets")
        if sets is not None:
            from data_prep.decontaminate import EvaluationSets

            sets = EvaluationSets.from_bytes((folder / EVALUATION_FILE).read(), sets)
        return cls(
            source,
            tokenizer_of(source, words),
            document["settings"],
            tuple(InputSplit(*split) for split in document["splits"]),
            tuple(Input(*file) for file in document["inputs"]),
            tuple(UnreadInput(*file) for file in document.get("unread", ())),
            sets,
        )
