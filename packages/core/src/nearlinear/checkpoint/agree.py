"""What every rank says, known to every rank: JSON through a collective, never pickle."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import torch
import torch.distributed as dist

from .. import c10d_names, runtime
from ..errors import CheckpointError, NearlinearError


def everyone(value) -> list:
    """``value`` (JSON) of every rank, in their order. A collective call."""
    now = runtime.current()
    text = bytearray(json.dumps(value).encode())
    mine = torch.tensor([len(text)], dtype=torch.int64, device=now.device)
    sizes = torch.empty(dist.get_world_size(), dtype=torch.int64, device=now.device)
    c10d_names.all_gather(sizes, mine)
    longest = int(sizes.max())
    text.extend(b" " * (longest - len(text)))  # white space is no part of JSON
    here = torch.frombuffer(text, dtype=torch.uint8).to(now.device)
    all_texts = torch.empty(dist.get_world_size() * longest, dtype=torch.uint8, device=now.device)
    c10d_names.all_gather(all_texts, here)
    return [json.loads(part.numpy().tobytes()) for part in all_texts.cpu().split(longest)]


def some(faults: list[str], shown: int = 3) -> str:
    """The first of ``faults``, in words for an error, and how many more there are."""
    more = f", and {len(faults) - shown} more" if len(faults) > shown else ""
    return "; ".join(sorted(faults)[:shown]) + more


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What fails in the block on one rank is raised as CheckpointError on all of them, after it.

    A collective call. Where the block has collectives itself it fails after the last of them.
    """
    failed = ""
    try:
        yield
    except NearlinearError as error:
        failed = str(error)
    failures = [why for why in everyone(failed) if why]
    if failures:
        raise CheckpointError(failures[0])
