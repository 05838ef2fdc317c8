"""`nl.export_hf` and `nl.export_checkpoint`: Hugging Face folders of a run and of a checkpoint.

The tensors of a run are gathered one by one, on the ranks that write: each file has one, and in a
step every writer gets a tensor's blocks from the ranks that hold them, all in one exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ... import runtime
from ...errors import CheckpointError
from ...storage import on_disk
from .. import holdings, state
from ..agree import everyone, together
from ..pieces import Piece, writers
from ..stream import DTYPES, Stream
from ..whole import Whole
from . import skeleton
from .naming import Stored, stored
from .target import MAX_SHARD_BYTES, Entry, Shard, Target, shards


def export_hf(
    path,
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer=None,
    overwrite: bool = False,
) -> Path:
    """Write ``model``, of any layout, as a folder for ``transformers``' from_pretrained; its path.

    ``path`` must be one that all ranks see. Values are as the model has them (float32 under mixed
    precision), or rounded to ``dtype``, as in torch.bfloat16. Files have at most
    ``max_shard_bytes``; ranks write them side by side and hold a tensor of the folder at a time.
    ``tokenizer``: a folder whose tokenizer goes with it, as ``tokens/tokenizer``. An existing
    folder stays as it is without ``overwrite``, and with it until the new one is whole. Raises
    CheckpointError on all ranks. A collective call, between steps.
    """
    now = runtime.current()
    target = Target(on_disk(path), overwrite, Path(tokenizer) if tokenizer else None)
    tensors = state.parts_of(model)
    here = holdings.blocks_of(tensors)
    told = everyone(holdings.told(tensors, here))
    with together():
        whole = {name: entry for rank in told for name, entry in rank.items()}
        bare = skeleton.of_model(model)
        files = _files(bare, whole, dtype, max_shard_bytes)
        if now.rank == 0:
            target.begin()
    try:
        with together():
            _write(target.partial, files, _Held(here, told, dtype), now)
        with together():
            if now.rank == 0:
                target.finish(bare, files)
    except CheckpointError:
        if now.rank == 0:
            target.abandon()
        raise
    return target.path


def export_checkpoint(
    folder,
    path,
    described: dict,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer=None,
    overwrite: bool = False,
) -> Path:
    """`export_hf` of the model in the checkpoint ``folder``: one process, no cluster.

    ``described`` is the model's config.json as a dict. Every file that is read is checked before.
    Raises CheckpointError.
    """
    target = Target(on_disk(path), overwrite, Path(tokenizer) if tokenizer else None)
    source = Whole(folder)
    prefix = f"{state.MODEL}/"
    whole = {
        name.removeprefix(prefix): {"dtype": tensor.dtype, "shape": tensor.shape}
        for name, tensor in source.index.tensors.items()
        if name.startswith(prefix)
    }
    bare = skeleton.of_config(described)
    files = _files(bare, whole, dtype, max_shard_bytes)
    target.begin()
    try:
        for shard in files:
            stream = shard.opened(target.partial)
            for entry in shard.entries:
                block = source.block(prefix + entry.stored.of, entry.stored.block)
                stream.add(entry.stored.arranged(block).to(entry.dtype))
            stream.close()
        target.finish(bare, files)
    except OSError as error:
        target.abandon()
        raise CheckpointError(_cannot_write(target.path, error)) from None
    except BaseException:
        target.abandon()
        raise
    return target.path


def _files(bare: nn.Module, whole: dict, dtype, max_bytes: int) -> list[Shard]:
    """What to write of tensors whose dtype and shape ``whole`` tells. Raises CheckpointError."""
    if dtype is not None and not (dtype in DTYPES and dtype.is_floating_point):
        raise CheckpointError(f"dtype = {dtype!r}: take torch.float32, float16 or bfloat16")
    wanted = stored(bare)
    expected = {name: tuple(part.tensor.shape) for name, part in state.parts_of(bare).items()}
    kind = type(bare).__name__
    for name in sorted(expected.keys() | whole.keys()):
        here, there = whole.get(name), expected.get(name)
        if here is None or there is None:
            raise CheckpointError(
                f"{name} is only {'in the config of' if here is None else 'in what is exported as'}"
                f" {kind}: its config is not the one that the values belong to"
            )
        if tuple(here["shape"]) != there:
            raise CheckpointError(
                f"{name} has {list(here['shape'])}, and by the config of {kind} it has "
                f"{list(there)}: give the config that the model was trained with"
            )
    entries = []
    for each in wanted:
        has = getattr(torch, whole[each.of]["dtype"])
        entries.append(Entry(each, dtype if dtype and has.is_floating_point else has))
    return shards(entries, max_bytes)


def _write(folder: Path, files: Sequence[Shard], held: _Held, now: runtime.Runtime) -> None:
    """Write the files that are this rank's; a collective call, also where writing fails."""
    ranks = now.mesh.world
    jobs: list[list[tuple[Shard, Entry]]] = [[] for _ in range(ranks)]
    for number, shard in enumerate(files):
        writer = number % ranks if len(files) > ranks else number * ranks // len(files)
        jobs[writer] += [(shard, entry) for entry in shard.entries]
    stream: Stream | None = None
    failed = ""
    for step in range(max(map(len, jobs))):
        asked = [job[step][1] if step < len(job) else None for job in jobs]
        values = held.exchange(asked, now)
        if values is None or failed:
            continue
        shard, entry = jobs[now.rank][step]
        try:
            if entry is shard.entries[0]:
                stream = shard.opened(folder)
            stream.add(values)
            if entry is shard.entries[-1]:
                stream.close()
        except OSError as error:
            failed = _cannot_write(folder, error)
    if failed:
        raise CheckpointError(f"rank {now.rank}: {failed}")


def _cannot_write(folder: Path, error: OSError) -> str:
    return (
        f"{folder} cannot be written ({error.strerror or error}): it must be a folder that all "
        "ranks see, with room for the model"
    )


class _Held:
    """The blocks that the ranks of a run hold, each to be sent by one of them."""

    def __init__(self, here: dict, told: list[dict], dtype: torch.dtype | None):
        self.here, self.dtype = here, dtype
        chosen = writers([list(holdings.listed(rank)) for rank in told])
        self.senders: dict[str, list[tuple[Piece, int]]] = {}
        for rank, some in enumerate(chosen):
            for name, piece in some:
                self.senders.setdefault(name, []).append((piece, rank))
        for pieces in self.senders.values():
            pieces.sort()

    def exchange(self, asked: Sequence[Entry | None], now: runtime.Runtime) -> torch.Tensor | None:
        """What this rank has asked for, whole; ``asked``: by every rank. A collective call."""
        sent = [list(self._sent(entry, now.rank)) if entry else [] for entry in asked]
        mine = asked[now.rank]
        coming = self._parts(mine) if mine else []
        sizes = [0] * len(asked)
        for part, rank in coming:
            sizes[rank] += torch.Size(part.shape).numel() * mine.dtype.itemsize
        parts = [part for to in sent for part in to]
        out = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=now.device)
        came = torch.empty(sum(sizes), dtype=torch.uint8, device=now.device)
        dist.all_to_all_single(came, out, sizes, [sum(map(len, to)) for to in sent])
        return self._assembled(mine, coming, came.split(sizes)) if mine else None

    def _sent(self, entry: Entry, rank: int) -> Iterator[torch.Tensor]:
        """The bytes of what ``rank``, this one, has to send of ``entry``, part by part."""
        held = self.here.get(entry.stored.of, {})
        for piece, sender in self.senders[entry.stored.of]:
            common = piece.overlap(entry.stored.block)
            if sender == rank and common is not None:
                part = held[piece][common.inside(piece)].to(entry.dtype).contiguous()
                yield part.view(-1).view(torch.uint8)

    def _parts(self, entry: Entry) -> list[tuple[Piece, int]]:
        """What ``entry`` is made of, and who sends it."""
        found = []
        for piece, sender in self.senders[entry.stored.of]:
            common = piece.overlap(entry.stored.block)
            if common is not None:
                found.append((common, sender))
        return found

    def _assembled(self, entry: Entry, coming, came) -> torch.Tensor:
        stored: Stored = entry.stored
        whole = torch.empty(stored.block.shape, dtype=entry.dtype, device=came[0].device)
        at = [0] * len(came)
        for part, rank in coming:
            size = torch.Size(part.shape).numel() * entry.dtype.itemsize
            values = came[rank][at[rank] : at[rank] + size]
            at[rank] += size
            whole[part.inside(stored.block)] = values.view(entry.dtype).view(part.shape)
        return stored.arranged(whole)
