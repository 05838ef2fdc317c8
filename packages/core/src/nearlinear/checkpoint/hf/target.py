"""A Hugging Face folder in the making: written beside its place, and there from one moment on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ...errors import CheckpointError
from ...storage.disk import settle
from ..stream import Stream, in_order
from .listing import CONFIG, INDEX, WEIGHTS
from .naming import Stored

MAX_SHARD_BYTES = 5 * 10**9
OF_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Entry:
    """One tensor to be written."""

    stored: Stored
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.stored.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One file to be written, tensor by tensor in this order."""

    file: str
    entries: tuple[Entry, ...]

    def opened(self, folder: Path) -> Stream:
        return Stream(folder / self.file, {e.stored.name: (e.dtype, e.stored.shape)
                                           for e in self.entries})  # fmt: skip


def shards(entries: Sequence[Entry], max_bytes: int) -> list[Shard]:
    """``entries`` in files of at most ``max_bytes``, unless one tensor is larger."""
    if not isinstance(max_bytes, int) or max_bytes < 1:
        raise CheckpointError(f"max_shard_bytes = {max_bytes!r}: give bytes, as in 5_000_000_000")
    groups: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.bytes
    stem, suffix = Path(WEIGHTS).stem, Path(WEIGHTS).suffix
    names = [f"{stem}-{at:05d}-of-{len(groups):05d}{suffix}" for at in range(1, len(groups) + 1)]
    names = [WEIGHTS] if len(groups) == 1 else names
    return [Shard(name, _as_written(group)) for name, group in zip(names, groups, strict=True)]


def _as_written(group: list[Entry]) -> tuple[Entry, ...]:
    by_name = {entry.stored.name: entry for entry in group}
    told = {name: (entry.dtype, entry.stored.shape) for name, entry in by_name.items()}
    return tuple(by_name[name] for name in in_order(told))


@dataclass(frozen=True)
class Target:
    """Where a folder is to be."""

    path: Path
    overwrite: bool = False
    tokenizer: Path | None = None

    @property
    def partial(self) -> Path:
        """Where it is until it is whole."""
        return self.path.with_name(f".{self.path.name}.partial")

    def begin(self) -> None:
        """Make room, once. Raises CheckpointError, and leaves what is there as it is."""
        if self.path.exists():
            if not self.overwrite:
                raise CheckpointError(
                    f"{self.path} exists already: choose another folder, or say overwrite"
                )
            if not self.path.is_dir() or (any(self.path.iterdir())
                                          and not (self.path / CONFIG).is_file()):  # fmt: skip
                raise CheckpointError(
                    f"{self.path} is no model's folder ({CONFIG} is not in it), and is not "
                    "overwritten: choose another one"
                )
        if self.tokenizer and not self._of_tokenizer():
            raise CheckpointError(
                f"{self.tokenizer} has no tokenizer: name the folder with tokenizer.json, as "
                "data_prep writes it (tokens/tokenizer), or none"
            )
        with self._telling():
            if self.partial.exists():  # of one that was killed
                shutil.rmtree(self.partial)
            self.partial.mkdir(parents=True)

    def finish(self, bare: nn.Module, written: Sequence[Shard]) -> None:
        """Add what is no tensor, and put the folder in its place. Raises CheckpointError."""
        missing = [shard.file for shard in written if not (self.partial / shard.file).is_file()]
        if missing:
            raise CheckpointError(
                f"{self.partial / missing[0]}, which another rank has written, is not there: "
                "export to a folder that all nodes see"
            )
        with self._telling():
            entries = [entry for shard in written for entry in shard.entries]
            _write_configs(bare, entries, self.partial)
            if len(written) > 1:
                _write_index(bare, written, self.partial)
            for path in self._of_tokenizer() if self.tokenizer else ():
                shutil.copyfile(path, self.partial / path.name)
            settle(self.partial)
            old = self.path.with_name(f".{self.path.name}.old")
            if self.path.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.replace(self.path, old)
            os.replace(self.partial, self.path)
            shutil.rmtree(old, ignore_errors=True)
            settle(self.path.parent)

    def abandon(self) -> None:
        """Leave nothing of a folder that could not be finished."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def _of_tokenizer(self) -> list[Path]:
        return [path for name in OF_TOKENIZERS if (path := self.tokenizer / name).is_file()]

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be written ({error.strerror or error}): make room or mend the "
                "permissions, or choose another folder"
            ) from None


def _write_configs(bare: nn.Module, entries: Sequence[Entry], folder: Path) -> None:
    """config.json, and generation_config.json of models that generate."""
    config = bare.config
    config.architectures = [type(bare).__name__]
    config.dtype = next(e.dtype for e in entries if e.dtype.is_floating_point)
    config.use_cache = True  # runs train without, and who loads a model wants to generate
    config.save_pretrained(folder)
    if bare.can_generate() and bare.generation_config is not None:
        bare.generation_config.use_cache = True
        bare.generation_config.save_pretrained(folder)


def _write_index(bare: nn.Module, written: Sequence[Shard], folder: Path) -> None:
    told: Mapping[str, str] = {e.stored.name: s.file for s in written for e in s.entries}
    data = {
        "metadata": {
            "total_parameters": sum(p.numel() for p in bare.parameters()),
            "total_size": sum(e.bytes for s in written for e in s.entries),
        },
        "weight_map": dict(told),
    }
    text = json.dumps(data, indent=2, sort_keys=True) + "\n"
    (folder / INDEX).write_text(text, encoding="utf-8")
