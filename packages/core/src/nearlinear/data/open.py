"""Resolve a dataset path to a source of token shards."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import DataError
from .cache import cache_folder
from .format import MANIFEST_FILE
from .source import LocalShards, ShardSource
from .token_files import open_token_files

CHANNEL = "channel:"
CHANNELS = Path("/opt/ml/input/data")
"""Folder of the input channels of a SageMaker job."""


def open_split(
    path: str | Path,
    split: str,
    verify: str,
    cache: str | Path | None = None,
    cache_gib: float = 0,
    vocab_size: int = 0,
    eos_id: int = -1,
) -> ShardSource:
    """Open one split of a dataset.

    Args:
        path: One of

            - a folder with an index.json: token shards;
            - `s3://bucket/prefix`: token shards in a bucket;
            - `channel:name`: the folder of an input channel of a SageMaker job;
            - a token file of another project, or a folder of them: .bin of Megatron or nanoGPT, .ds
              of datatrove, .npy of OLMo or NumPy, or a folder of litdata or Streaming.
        split: Name of the split.
        verify: Extent of the integrity check, see `TokenDataset`.
        cache: Cache folder for remote shards; defaults to ~/.cache/nearlinear.
        cache_gib: Size limit of the cache in GiB, or 0 for no limit.
        vocab_size: Vocabulary size of files of other projects; 0 means GPT-2's.
        eos_id: EOS id of files of other projects; -1 means the last id.

    Raises:
        DataError: If the data is missing or damaged, or an argument does not apply to it.
    """
    name = os.fspath(path)
    if name.startswith(CHANNEL):
        path = _channel(name.removeprefix(CHANNEL))
    elif re.match("s3:/", name):
        from .bucket import RemoteShards

        _reject_vocabulary(name, vocab_size, eos_id)
        return RemoteShards(name, split, cache_folder(cache), cache_gib)
    path = Path(path)
    if found := open_token_files(path, split, vocab_size, eos_id):
        return found
    _reject_vocabulary(name, vocab_size, eos_id)
    return LocalShards(path, split, verify)


def _reject_vocabulary(path: str, vocab_size: int, eos_id: int) -> None:
    if vocab_size or eos_id >= 0:
        raise DataError(
            f"{path} holds token shards, and {MANIFEST_FILE} defines their vocabulary: drop "
            "data.vocab_size and data.eos_id"
        )


def _channel(name: str) -> Path:
    """Return the folder of an input channel of this SageMaker job."""
    words = (
        name.upper(),
        re.sub("[^A-Z0-9]", "_", name.upper()),
    )  # spellings differ between launchers
    told = [os.environ[known] for word in words if (known := f"SM_CHANNEL_{word}") in os.environ]
    folder = Path(told[0] if told else CHANNELS / name)
    if not folder.is_dir():
        raise DataError(
            f"{CHANNEL}{name}: this job has no such channel ({folder} is not a folder): add an "
            "input channel of this name to the job, or give a folder"
        )
    return folder
