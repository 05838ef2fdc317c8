"""Write a Hugging Face folder under a temporary name, and move it into place when complete."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import storage
from ...config.architecture import CONFIG, INDEX, WEIGHTS
from ...errors import CheckpointError
from ...storage import StoragePath
from ...storage.local import sync_directory
from ..safetensors_file import SafetensorsWriter, file_order
from .naming import HFTensor

MAX_SHARD_BYTES = 5 * 10**9
"""Default size limit of a file, as in transformers."""
TOKENIZER_FOLDER = "tokenizer"
"""Folder of the tokenizer beside the checkpoints of a run, and in a folder of token shards."""
TOKENIZER_FILES = (
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
class OutputTensor:
    """One tensor to write, with its dtype in the file."""

    tensor: HFTensor
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.tensor.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class OutputFile:
    """One file to write, with its tensors in file order."""

    name: str
    tensors: tuple[OutputTensor, ...]

    def open(self, folder: Path) -> SafetensorsWriter:
        specs = {each.tensor.name: (each.dtype, each.tensor.shape) for each in self.tensors}
        return SafetensorsWriter(folder / self.name, specs)


def split_into_files(tensors: Sequence[OutputTensor], max_bytes: int) -> list[OutputFile]:
    """Split ``tensors`` into files of at most ``max_bytes``; a larger tensor has its own file."""
    if not isinstance(max_bytes, int) or max_bytes < 1:
        raise CheckpointError(
            f"max_shard_bytes = {max_bytes!r} is not a positive integer: pass a number of bytes, "
            "as in 5_000_000_000"
        )
    groups: list[list[OutputTensor]] = [[]]
    size = 0
    for each in tensors:
        if groups[-1] and size + each.bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(each)
        size += each.bytes
    stem, suffix = Path(WEIGHTS).stem, Path(WEIGHTS).suffix
    names = [f"{stem}-{at:05d}-of-{len(groups):05d}{suffix}" for at in range(1, len(groups) + 1)]
    names = [WEIGHTS] if len(groups) == 1 else names
    return [OutputFile(name, _sort(group)) for name, group in zip(names, groups, strict=True)]


def _sort(group: list[OutputTensor]) -> tuple[OutputTensor, ...]:
    by_name = {each.tensor.name: each for each in group}
    specs = {name: (each.dtype, each.tensor.shape) for name, each in by_name.items()}
    return tuple(by_name[name] for name in file_order(specs))


@dataclass(frozen=True)
class FolderWriter:
    """Creates the folder ``path`` atomically from a temporary folder beside it."""

    path: Path
    overwrite: bool = False
    """Replace a model in ``path``."""
    tokenizer: str | os.PathLike[str] | StoragePath | None = None
    """Folder whose tokenizer files are copied."""
    config: str = CONFIG
    """File that marks a folder of the kind to write."""

    @property
    def partial(self) -> Path:
        """Temporary folder."""
        return self.path.with_name(f".{self.path.name}.partial")

    def begin(self) -> None:
        """Create the temporary folder. Raises CheckpointError and leaves ``path`` unchanged."""
        if self.path.exists():
            if not self.overwrite:
                raise CheckpointError(
                    f"{self.path} already exists: choose another folder, or pass overwrite=True "
                    "(--overwrite)"
                )
            if not self.path.is_dir() or (any(self.path.iterdir())
                                          and not (self.path / self.config).is_file()):  # fmt: skip
                raise CheckpointError(
                    f"{self.path} is not a model folder ({self.config} is missing) and is not "
                    "overwritten: choose another folder"
                )
        if self.tokenizer and not _tokenizer_names(storage.as_path(self.tokenizer)):
            raise CheckpointError(
                f"tokenizer = {self.tokenizer} has no tokenizer files: pass a folder with "
                "tokenizer.json, as written by data_prep (tokens/tokenizer), or none"
            )
        with self._report_os_errors():
            if self.partial.exists():  # from a process that was killed
                shutil.rmtree(self.partial)
            self.partial.mkdir(parents=True)

    def finish(self, bare: Any, written: Sequence[OutputFile]) -> None:
        """Add configs, index and tokenizer; move the folder to ``path``. Raises CheckpointError."""
        missing = [file.name for file in written if not (self.partial / file.name).is_file()]
        if missing:
            raise CheckpointError(
                f"{self.partial / missing[0]}, written by another rank, is missing: export to a "
                "folder shared by all nodes"
            )
        with self._report_os_errors():
            _write_configs(bare, written, self.partial)
            if len(written) > 1:
                _write_index(bare, written, self.partial)
        self.publish()

    def publish(self) -> None:
        """Add the tokenizer and move the folder to ``path``. Raises CheckpointError."""
        with self._report_os_errors():
            found = tokenizer_files(self.tokenizer) if self.tokenizer else {}
            for name, data in found.items():
                (self.partial / name).write_bytes(data)
            _end_generation_with_turns(self.partial)
            sync_directory(self.partial)
            old = self.path.with_name(f".{self.path.name}.old")
            if self.path.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.replace(self.path, old)
            os.replace(self.partial, self.path)
            shutil.rmtree(old, ignore_errors=True)
            sync_directory(self.path.parent)

    def abandon(self) -> None:
        """Delete the temporary folder."""
        shutil.rmtree(self.partial, ignore_errors=True)

    @contextlib.contextmanager
    def _report_os_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be written ({error.strerror or error}): free space, fix the "
                "permissions, or choose another folder"
            ) from None


def tokenizer_files(folder: str | os.PathLike[str] | StoragePath) -> dict[str, bytes]:
    """Return the files of the tokenizer in ``folder`` by name, empty without a tokenizer."""
    place = storage.as_path(folder)
    return {name: (place / name).read() for name in _tokenizer_names(place)}


def tokenizer_beside(checkpoint: StoragePath) -> StoragePath | None:
    """Return the folder of the tokenizer beside a run's checkpoint, or None without one."""
    folder = checkpoint.parent / TOKENIZER_FOLDER
    return folder if _tokenizer_names(folder) else None


def _tokenizer_names(folder: StoragePath) -> list[str]:
    present = folder.file_sizes()
    return [name for name in TOKENIZER_FILES if name in present]


def _end_generation_with_turns(folder: Path) -> None:
    """Let generation end at the end of an assistant's turn, if there is a chat template."""
    config = folder / "generation_config.json"
    if not config.is_file() or not (folder / "tokenizer.json").is_file():
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template:
        settings = json.loads(config.read_text(encoding="utf-8"))
        known = settings.get("eos_token_id")
        known = known if isinstance(known, list) else [known]
        ids = {*known, tokenizer.eos_token_id, turn_end(tokenizer)} - {None}
        settings["eos_token_id"] = sorted(ids)
        config.write_text(f"{json.dumps(settings, indent=2)}\n", encoding="utf-8")


def turn_end(tokenizer: Any) -> int | None:
    """Return the id of the control token that ends an assistant's turn in the chat template."""
    words = "answer"
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": words}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    rest = text[text.rindex(words) + len(words) :]
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"]
    return next((token for token in ids if token in tokenizer.added_tokens_decoder), None)


def _write_configs(bare: Any, written: Sequence[OutputFile], folder: Path) -> None:
    """Write config.json, and generation_config.json for models that generate."""
    tensors = [each for file in written for each in file.tensors]
    config = bare.config
    config.architectures = [type(bare).__name__]
    config.dtype = next(e.dtype for e in tensors if e.dtype.is_floating_point)
    config.use_cache = True  # off in training, needed for generation
    config.save_pretrained(folder)
    if bare.can_generate() and bare.generation_config is not None:
        bare.generation_config.use_cache = True
        bare.generation_config.save_pretrained(folder)


def _write_index(bare: nn.Module, written: Sequence[OutputFile], folder: Path) -> None:
    data = {
        "metadata": {
            "total_parameters": sum(p.numel() for p in bare.parameters()),
            "total_size": sum(each.bytes for file in written for each in file.tensors),
        },
        "weight_map": {each.tensor.name: file.name for file in written for each in file.tensors},
    }
    text = json.dumps(data, indent=2, sort_keys=True) + "\n"
    (folder / INDEX).write_text(text, encoding="utf-8")
