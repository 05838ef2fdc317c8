"""What the name of some tokens means: where they are, and who wrote them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import DataError
from .cache import cache_folder
from .folder import Folder
from .foreign import foreign
from .format import MANIFEST_FILE
from .split import Split

CHANNEL = "channel:"
CHANNELS = Path("/opt/ml/input/data")
"""where a SageMaker job has its channels"""


def open_split(
    path: str | Path,
    split: str,
    verify: str,
    cache: str | Path | None = None,
    cache_gib: float = 0,
    vocab_size: int = 0,
    eos_id: int = -1,
) -> Split:
    """A split of what `path` names. Raises `DataError`.

    - a folder with an index.json: token shards;
    - ``s3://bucket/prefix``: the same in a bucket;
    - ``channel:name``: the folder that a SageMaker job has as that channel;
    - a .bin, its name without that, or a folder of them: Megatron's, with an .idx beside each, or
      else nanoGPT's; `vocab_size` (0: GPT-2's) and `eos_id` (-1: its last id) are of these alone.
    """
    name = os.fspath(path)
    if name.startswith(CHANNEL):
        path = _channel(name.removeprefix(CHANNEL))
    elif re.match("s3:/", name):
        from .bucket import Bucket

        _refuse_words(name, vocab_size, eos_id)
        return Bucket(name, split, cache_folder(cache), cache_gib)
    path = Path(path)
    if not (path / MANIFEST_FILE).is_file():
        if found := foreign(path, split, vocab_size, eos_id):
            return found
    _refuse_words(name, vocab_size, eos_id)
    return Folder(path, split, verify)


def _refuse_words(path: str, vocab_size: int, eos_id: int) -> None:
    if vocab_size or eos_id >= 0:
        raise DataError(
            f"{path} holds token shards, whose {MANIFEST_FILE} says what the ids are: drop "
            "data.vocab_size and data.eos_id"
        )


def _channel(name: str) -> Path:
    """A channel's folder, as SageMaker tells it to the job."""
    words = name.upper(), re.sub("[^A-Z0-9]", "_", name.upper())  # by whoever lays it out
    told = [os.environ[known] for word in words if (known := f"SM_CHANNEL_{word}") in os.environ]
    folder = Path(told[0] if told else CHANNELS / name)
    if not folder.is_dir():
        raise DataError(
            f"{CHANNEL}{name}: this job has no such channel ({folder} is not there): name an input "
            "of the job so, or give a folder"
        )
    return folder
