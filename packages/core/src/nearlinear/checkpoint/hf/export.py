"""`nl.export_hf` and `nl.export_checkpoint`: write Hugging Face folders of runs and checkpoints.

The ranks of a run write different files at the same time, and no rank holds more than one tensor of
the folder. In each round every writing rank receives the shards of its next tensor from the ranks
that hold them, in a single all-to-all.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...checkpoint.state import job_runtime
from ...distributed import runtime
from ...distributed.consensus import all_gather_json, raise_on_all_ranks
from ...errors import CheckpointError
from ...storage import require_local
from .. import state
from ..reader import CheckpointReader
from ..safetensors_file import DTYPES, SafetensorsWriter
from ..save import ShardMemory, describe_shards, iterate_shards, local_memory
from ..shards import TensorShard, assign_writers
from . import meta_model
from .adapters import ADAPTER_CONFIG, MergedWeights, is_adapter, is_transposed
from .naming import HFTensor, hf_tensors, whole_tensor
from .writer import MAX_SHARD_BYTES, FolderWriter, OutputFile, OutputTensor, split_into_files


def export_hf(
    path: str | Path,
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write ``model`` as a folder for ``from_pretrained`` of `transformers`; return its path.

    Example::

        nl.export_hf("exported", model, dtype=torch.bfloat16)

    A collective call, between steps. Raises CheckpointError on all ranks.

    Args:
        path: The folder to write, shared by all ranks.
        model: A model of any layout.
        dtype: Dtype of floating-point tensors in the folder, as in torch.bfloat16. The default is
            the dtype of the parameters (float32 under mixed precision).
        max_shard_bytes: Size limit of a file.
        tokenizer: Folder with the tokenizer to copy, as in ``tokens/tokenizer``.
        overwrite: Replace an existing model in ``path``, once the new one is complete.
    """
    now = job_runtime(model)
    writer = FolderWriter(require_local(path), overwrite, tokenizer)
    tensors = state.model_tensors(model)
    if any(map(is_adapter, tensors)):
        raise CheckpointError(
            "the model has adapters, which are merged from a checkpoint: nl.save it, and call "
            "nearlinear export"
        )
    local = local_memory(tensors)
    described = all_gather_json(describe_shards(tensors, local))
    bare, files = None, []
    with raise_on_all_ranks():
        whole = {name: entry for rank in described for name, entry in rank.items()}
        bare = meta_model.build_like(model)
        files = _plan_files(bare, whole, dtype, max_shard_bytes)
        if now.rank == 0:
            writer.begin()
    try:
        with raise_on_all_ranks():
            _write_files(writer.partial, files, _ShardExchange(local, described), now)
        with raise_on_all_ranks():
            if now.rank == 0:
                writer.finish(bare, files)
    except CheckpointError:
        if now.rank == 0:
            writer.abandon()
        raise
    return writer.path


def export_checkpoint(
    folder,
    path: str | Path,
    described: dict,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the model of a checkpoint as `export_hf` does, in one process.

    Each file is checked before it is read. Raises CheckpointError.

    Args:
        folder: The checkpoint.
        path: The folder to write.
        described: The model's config.json as a dict.
        dtype: See `export_hf`.
        max_shard_bytes: See `export_hf`.
        tokenizer: See `export_hf`.
        overwrite: See `export_hf`.
    """
    writer = FolderWriter(require_local(path), overwrite, tokenizer)
    source = CheckpointReader(folder)
    weights = MergedWeights(source)
    prefix = f"{state.MODEL}/"
    whole = {
        name.removeprefix(prefix): {"dtype": tensor.dtype, "shape": tensor.shape}
        for name, tensor in source.index.tensors.items()
        if name.startswith(prefix) and not is_adapter(name)
    }
    bare = meta_model.build_from_config(described)
    files = _plan_files(bare, whole, dtype, max_shard_bytes)
    writer.begin()
    try:
        for file in files:
            stream = file.open(writer.partial)
            for each in file.tensors:
                transposed = is_transposed(bare, each.tensor.source)
                block = weights.read(each.tensor.source, each.tensor.block, transposed)
                stream.add(each.tensor.to_hf(block).to(each.dtype))
            stream.close()
        writer.finish(bare, files)
    except OSError as error:
        writer.abandon()
        raise CheckpointError(_write_error(writer.path, error)) from None
    except BaseException:
        writer.abandon()
        raise
    return writer.path


def export_adapter(
    folder,
    path: str | Path,
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the adapters of a checkpoint for ``peft``, in one process. Raises CheckpointError.

    Args:
        folder: The checkpoint.
        path: The folder to write.
        tokenizer: See `export_hf`.
        overwrite: See `export_hf`.
    """
    weights = MergedWeights(CheckpointReader(folder))
    writer = FolderWriter(require_local(path), overwrite, tokenizer, ADAPTER_CONFIG)
    writer.begin()
    try:
        weights.write(writer.partial)
        writer.publish()
    except BaseException:
        writer.abandon()
        raise
    return writer.path


def _plan_files(
    bare: nn.Module, whole: Mapping[str, Mapping[str, Any]], dtype: torch.dtype | None, limit: int
) -> list[OutputFile]:
    """Return the files to write. Raises CheckpointError.

    Args:
        bare: The model on the meta device.
        whole: Dtype and shape of the model's tensors, by name.
        dtype: Dtype of floating-point tensors, or None to keep theirs.
        limit: Size limit of a file in bytes.
    """
    if dtype is not None and not (dtype in DTYPES and dtype.is_floating_point):
        raise CheckpointError(
            f"dtype = {dtype!r} is not supported: use torch.float32, torch.float16 or "
            "torch.bfloat16"
        )
    wanted = hf_tensors(bare)
    expected = {name: tuple(each.tensor.shape) for name, each in state.model_tensors(bare).items()}
    kind = type(bare).__name__
    for name in sorted(expected.keys() | whole.keys()):
        saved, shape = whole.get(name), expected.get(name)
        if saved is None or shape is None:
            where = "in the config of" if saved is None else "in the values exported as"
            raise CheckpointError(
                f"{name} is only {where} {kind}: use the config that the model was trained with"
            )
        if tuple(saved["shape"]) != shape:
            raise CheckpointError(
                f"{name} has shape {list(saved['shape'])}, and the config of {kind} gives "
                f"{list(shape)}: use the config that the model was trained with"
            )
    tensors = []
    for tensor in wanted:
        saved_dtype = getattr(torch, whole[tensor.source]["dtype"])
        converted = dtype if dtype and saved_dtype.is_floating_point else saved_dtype
        tensors.append(OutputTensor(tensor, converted))
    return split_into_files(tensors, limit)


def _write_files(
    folder: Path, files: Sequence[OutputFile], shards: _ShardExchange, now: runtime.Runtime
) -> None:
    """Write this rank's files. A collective call, even on a rank whose writes fail."""
    ranks = now.mesh.world
    jobs: list[list[tuple[OutputFile, OutputTensor]]] = [[] for _ in range(ranks)]
    for number, file in enumerate(files):
        writer = number % ranks if len(files) > ranks else number * ranks // len(files)
        jobs[writer] += [(file, each) for each in file.tensors]
    stream: SafetensorsWriter | None = None
    failed = ""
    for turn in range(max(map(len, jobs))):
        requested = [job[turn][1] if turn < len(job) else None for job in jobs]
        values = shards.exchange(requested, now)
        if values is None or failed:
            continue
        file, tensor = jobs[now.rank][turn]
        try:
            if stream is None:
                stream = file.open(folder)
            stream.add(values)
            if tensor is file.tensors[-1]:
                stream.close()
                stream = None
        except OSError as error:
            failed = _write_error(folder, error)
    if failed:
        raise CheckpointError(f"rank {now.rank}: {failed}")


def _write_error(folder: Path, error: OSError) -> str:
    return (
        f"{folder} cannot be written ({error.strerror or error}): use a folder that all ranks "
        "share, with enough space for the model"
    )


def gather_tensors(
    tensors: dict[str, state.StateTensor],
    wanted: Sequence[HFTensor] | None,
    receivers: Collection[int],
    now: runtime.Runtime,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the values of each of ``wanted`` on the ranks ``receivers``.

    A collective call of all ranks, one exchange per tensor; iterate to the end.

    Args:
        tensors: Tensors of which this rank holds shards, by name.
        wanted: Blocks of the tensors of all ranks; None: all tensors, whole.
        receivers: Ranks that get the values.
        now: This rank's runtime.
    """
    local = local_memory(tensors)
    described = all_gather_json(describe_shards(tensors, local))
    entries = {name: entry for of_rank in described for name, entry in of_rank.items()}
    if wanted is None:
        wanted = [whole_tensor(name, name, entry["shape"]) for name, entry in entries.items()]
    exchange = _ShardExchange(local, described)
    for each in wanted:
        output = OutputTensor(each, getattr(torch, entries[each.source]["dtype"]))
        requested = [output if rank in receivers else None for rank in range(now.mesh.world)]
        values = exchange.exchange(requested, now)
        if values is not None:
            yield each.name, values


class _ShardExchange:
    """Assembles whole tensors from the shards of all ranks. One rank sends each shard."""

    def __init__(self, local: ShardMemory, described: Sequence[dict]):
        self.local = local
        self.senders: dict[str, list[tuple[TensorShard, int]]] = {}
        assigned = assign_writers([list(iterate_shards(rank)) for rank in described])
        for rank, shards in enumerate(assigned):
            for name, shard in shards:
                self.senders.setdefault(name, []).append((shard, rank))
        for senders in self.senders.values():
            senders.sort()

    def exchange(
        self, requested: Sequence[OutputTensor | None], now: runtime.Runtime
    ) -> torch.Tensor | None:
        """Return the tensor that this rank requested. A collective call.

        Args:
            requested: Tensor requested by each rank, or None.
            now: This rank's runtime.
        """
        sent = [list(self._outgoing(each, now.rank)) if each else [] for each in requested]
        mine = requested[now.rank]
        incoming = self._incoming(mine) if mine else []
        sizes = [0] * len(requested)
        for part, rank in incoming:
            sizes[rank] += _bytes(part, mine) if mine else 0
        parts = [part for to in sent for part in to]
        out = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=now.device)
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=now.device)
        dist.all_to_all_single(received, out, sizes, [sum(map(len, to)) for to in sent])
        return self._assemble(mine, incoming, received.split(sizes)) if mine else None

    def _outgoing(self, each: OutputTensor, rank: int) -> Iterator[torch.Tensor]:
        """Yield the bytes of each part of a tensor that this rank, ``rank``, sends."""
        local = self.local.get(each.tensor.source, {})
        for shard, sender in self.senders[each.tensor.source]:
            common = shard.intersect(each.tensor.block)
            if sender == rank and common is not None:
                part = local[shard][common.slices_in(shard)].to(each.dtype).contiguous()
                yield part.view(-1).view(torch.uint8)

    def _incoming(self, each: OutputTensor) -> list[tuple[TensorShard, int]]:
        """Return the parts of a tensor, each with the rank that sends it."""
        found = []
        for shard, sender in self.senders[each.tensor.source]:
            common = shard.intersect(each.tensor.block)
            if common is not None:
                found.append((common, sender))
        return found

    def _assemble(
        self,
        each: OutputTensor,
        incoming: list[tuple[TensorShard, int]],
        received: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        block = each.tensor.block
        whole = torch.empty(block.shape, dtype=each.dtype, device=received[0].device)
        position = [0] * len(received)
        for part, rank in incoming:
            size = _bytes(part, each)
            values = received[rank][position[rank] : position[rank] + size]
            position[rank] += size
            whole[part.slices_in(block)] = values.view(each.dtype).view(part.shape)
        return each.tensor.to_hf(whole)


def _bytes(part: TensorShard, each: OutputTensor) -> int:
    return torch.Size(part.shape).numel() * each.dtype.itemsize
