"""Divergence sentinel: compare fingerprints of the training state between ranks.

Replicas apply equal updates to equal states, so their shards stay equal bit by bit. A flipped bit
in memory, a faulty core or a wrong collective breaks that, and nothing else shows it. Every
``train.divergence_every`` steps, and before every checkpoint, ranks compare two fingerprints:

- replicas: of their shards of the parameters and of the optimizer's state;
- ranks of one copy of the model: of the parameters that they gathered in the forward pass.

In every step, replicas also compare the loss and the gradient norm of the step before. The numbers
travel in the all-reduce of the loss. A job without replicas has no second copy of a shard: only
faults of the gather itself are found there.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...checkpoint import state
from ...distributed import runtime
from ...distributed.consensus import all_gather_json
from ...distributed.mesh import Mesh
from ...errors import NearlinearError
from ...fsdp.model_state import local_tensor
from ...fsdp.optimizer_state import shards_optimizer_state
from . import Callback, TrainStep

_CHUNK = 1 << 16  # words that are multiplied by one table of weights: fits a cache
_BLOCK = 1 << 20  # words per operation, which bounds the temporary memory
_MASK = (1 << 64) - 1
_TOLERANCE = 1e-9  # relative, of losses and gradient norms
_SHOWN = 3


class ReplicasDiverged(NearlinearError):
    """Ranks that must hold equal values hold different ones."""

    everywhere = True
    exit_code: int = 1

    def __init__(self, finding: str, step: int, ranks: Sequence[int], remedy: str = ""):
        """
        Args:
            finding: The difference, with the ranks and their hosts.
            step: Step in which it was found.
            ranks: The faulty ranks.
            remedy: Replaces the usual one.
        """
        super().__init__(f"{finding}. {remedy or _REMEDY}")
        self.finding = finding
        self.step = step
        self.ranks = list(ranks)

    def judge_replay(self, first: ReplicasDiverged) -> ReplicasDiverged:
        """Return the error of a replay that found this difference after the difference ``first``.

        A deterministic bug comes back in the same step and on the same ranks.
        """
        if (self.step, self.ranks) == (first.step, first.ranks):
            verdict = (
                "The replay from the newest checkpoint differed in the same step on the same "
                "ranks: a deterministic bug, not a flipped bit. An operation depends on the rank, "
                "a collective is wrong, or the hardware of this host repeats its fault. Run "
                "the step on another host, then compare the named tensors rank by rank"
            )
        else:
            verdict = (
                f"A replay of the steps before had a different fault ({first.finding}). Faults "
                "that come back elsewhere point to defective hardware: take the named hosts out "
                "of the job, then resume from the newest checkpoint"
            )
        return ReplicasDiverged(self.finding, self.step, self.ranks, verdict)


class DivergenceSentinel(Callback):
    """Compare fingerprints of the state between ranks, and stop the run on all of them."""

    due: bool
    """True if the next step compares, whatever its number: the first one, or after a join."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, every: int, saves: int = 0
    ):
        """
        Args:
            model: The sharded model.
            optimizer: Its optimizer.
            every: Steps between comparisons.
            saves: Steps between checkpoints. Elastic replicas, of which one writes them, compare
                before the update of such a step. 0: no such comparison.
        """
        now = runtime.current()
        self.model: nn.Module = model
        self.optimizer: torch.optim.Optimizer = optimizer
        self.every: int = every
        self._replicas = groups_of_replicas(now.mesh)
        self._copies = groups_of_copies(now.mesh)
        self._has_replicas = now.mesh.replicate > 1
        self._elastic = self.due = now.replicas > 1
        self._saves = saves if self._elastic else 0
        self._whole_optimizer = not shards_optimizer_state(now)
        self._last = (math.nan, math.nan)
        self._collecting = False
        self._gathered: dict[int, torch.Tensor] = {}
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for number, unit in enumerate(units):
            unit.register_forward_pre_hook(self._hash_gathered(number))

    def on_step_begin(self, step: TrainStep) -> None:
        number = step.number
        saves = self._saves > 0 and number % self._saves == 0
        self._collecting = self.due or saves or number % self.every == 0
        self.due = False
        self._gathered = {}

    def on_rewind(self, number: int) -> None:
        self._last = (math.nan, math.nan)

    def rank_metrics(self, step: TrainStep) -> dict[str, float]:
        values: dict[str, float] = {"_last_loss": self._last[0], "_last_norm": self._last[1]}
        if self._collecting:
            self._collecting = False
            gathered = combine(self._gathered[number] for number in sorted(self._gathered))
            values |= _halves("_gathered", gathered)
            if self._has_replicas or self._elastic:
                values |= _halves("_state", self.fingerprint())
        return values

    def on_gradients_ready(self, step: TrainStep) -> None:
        self._last = step.loss, step.grad_norm
        number = step.number
        before = f"step {number}: after step {number - 1}"
        if "_state_high" in step.by_rank:
            self._check_state(_joined("_state", step.by_rank), before, number)
        if "_gathered_high" in step.by_rank:
            faulty = find_different(_joined("_gathered", step.by_rank), self._copies)
            if faulty:
                raise ReplicasDiverged(
                    f"step {number}: the parameters gathered for the forward pass differ from "
                    f"those of other ranks on {self._name(faulty)}",
                    number,
                    faulty,
                )
        for name in ("loss", "norm"):
            values = _merge_close(step.by_rank[f"_last_{name}"], self._replicas)
            if faulty := find_different(values, self._replicas):
                self._check_state(self._exchange(), before, number)
                raise ReplicasDiverged(
                    f"{before}, replicas have different values of the {name}: {self._name(faulty)}",
                    number,
                    faulty,
                )

    def on_checkpoint(self, number: int) -> None:
        if self._has_replicas:
            when = f"before the checkpoint of step {number}"
            self._check_state(self._exchange(), when, number)

    def fingerprint(self, optimizer: bool = True) -> int:
        """Return the fingerprint of this rank's shards of the parameters and optimizer state."""
        tensors = sorted(self._tensors(optimizer), key=lambda pair: pair[0])
        return combine(hash_tensor(tensor) for _, tensor in tensors)

    def _exchange(self) -> list[int]:
        """Return the fingerprints of all ranks. A collective call."""
        return all_gather_json(self.fingerprint())

    def _check_state(self, fingerprints: list[int], when: str, number: int) -> None:
        faulty = find_different(fingerprints, self._replicas)
        if not faulty:
            return
        hashes = {name: int(hash_tensor(tensor)) for name, tensor in self._tensors()}
        of_ranks = all_gather_json(hashes)
        names = [
            name
            for rank in faulty
            for name in of_ranks[rank]
            if find_different([each.get(name) for each in of_ranks], self._replicas)
        ]
        names = list(dict.fromkeys(names))
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise ReplicasDiverged(
            f"{when}, replicas hold different states: {self._name(faulty)} in "
            f"{', '.join(names[:_SHOWN]) or 'tensors that are equal by now'}{more}",
            number,
            faulty,
        )

    def _name(self, faulty: list[int]) -> str:
        """Name the faulty ranks and their hosts. A collective call."""
        hosts = all_gather_json(runtime.host())
        ranks = ", ".join(f"rank {rank} (host {hosts[rank]})" for rank in faulty[: 2 * _SHOWN])
        doubt = any(len(group) < 3 for group in self._replicas.values())
        several = len(faulty) > 1 and doubt
        return f"one of {ranks} (two replicas have no majority)" if several else ranks

    def _tensors(self, optimizer: bool = True) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield the tensors of which replicas hold equal copies."""
        for parameter, name in state.parameter_names(self.model).items():
            yield name, local_tensor(parameter.data)
        if not (optimizer and self._whole_optimizer):
            return
        names: dict[torch.Tensor, str] = {**state.updated_names(self.model)}
        for parameter, values in self.optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    local = local_tensor(value)
                    if type(local) is torch.Tensor:  # quantized states are no plain tensors
                        yield f"{key} of {names.get(parameter, 'a parameter')}", local

    def _hash_gathered(self, number: int) -> Callable[[nn.Module, object], None]:
        def hook(unit: nn.Module, arguments: object) -> None:
            if self._collecting and number not in self._gathered:
                hashes = (hash_tensor(local_tensor(p.detach())) for p in _own_parameters(unit))
                self._gathered[number] = _folded(hashes)

        return hook


_REMEDY = (
    "No checkpoint of this state was written. Run the same command again to resume from the last "
    "checkpoint, and test the memory and the accelerator of the named host; if it happens at the "
    "same step again, an operation is not deterministic across ranks "
    '(train.on_divergence = "replay" finds out by itself)'
)


def groups_of_replicas(mesh: Mesh) -> dict[Hashable, list[int]]:
    """Return the groups of ranks that hold equal shards."""
    return _grouped(mesh, ("pipeline", "shard", "context", "tensor"))


def groups_of_copies(mesh: Mesh) -> dict[Hashable, list[int]]:
    """Return the groups of ranks that gather equal parameters."""
    return _grouped(mesh, ("pipeline", "tensor"), by_expert=mesh.expert > 1)


def _grouped(
    mesh: Mesh, axes: tuple[str, ...], by_expert: bool = False
) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for rank in range(mesh.world):
        at = mesh.coordinates(rank)
        expert = mesh.group("expert", rank).index(rank) if by_expert else 0
        groups[*(at[axis] for axis in axes), expert].append(rank)
    return groups


def find_different(values: Sequence[Hashable], groups: Mapping[Hashable, list[int]]) -> list[int]:
    """Return the ranks whose value differs from that of the majority of their group.

    Without a majority, as among two ranks, all ranks of the group are returned.

    Args:
        values: One value of each rank.
        groups: Groups of ranks whose values must be equal.
    """
    faulty: list[int] = []
    for ranks in groups.values():
        counts = Counter(values[rank] for rank in ranks)
        if len(counts) < 2:
            continue
        [(common, number), *_] = counts.most_common(1)
        majority = 2 * number > len(ranks)
        faulty += [rank for rank in ranks if not majority or values[rank] != common]
    return sorted(faulty)


def fingerprints(step: TrainStep) -> list[int]:
    """Return the fingerprints of the state of all ranks of this job; empty if not due."""
    return _joined("_state", step.by_rank) if "_state_high" in step.by_rank else []


def find_diverged_replicas(payloads: Mapping[int, Any]) -> list[int]:
    """Return the elastic replicas that differ from the majority; all of them without a majority.

    Args:
        payloads: For each replica, the gradient norm ``norm`` and the ``fingerprints`` of a step.
    """
    if not all(payloads.values()):
        return []
    replicas = list(payloads)
    everyone: dict[Hashable, list[int]] = {0: list(range(len(payloads)))}
    states = [tuple(each["fingerprints"]) for each in payloads.values()]
    norms = _merge_close([each["norm"] for each in payloads.values()], everyone)
    faulty = find_different(states, everyone) if all(states) else []
    faulty = faulty or find_different(norms, everyone)
    return [replicas[position] for position in faulty]


def describe_different(payloads: Mapping[int, Any], faulty: Sequence[int]) -> str:
    """Return the difference between the ``faulty`` replicas and the others in words."""
    good = next((each for replica, each in payloads.items() if replica not in faulty), None)
    who = "one of replicas" if good is None else "replica" if len(faulty) == 1 else "replicas"
    text = f"{who} {', '.join(map(str, faulty))}"
    states = [each["fingerprints"] for each in payloads.values()]
    if not all(states) or all(state == states[0] for state in states):
        return f"{text} computed another gradient norm than the others"
    if good is not None and len(faulty) == 1:
        both = zip(payloads[faulty[0]]["fingerprints"], good["fingerprints"], strict=True)
        ranks = [str(rank) for rank, (mine, theirs) in enumerate(both) if mine != theirs]
        text += f" (rank {', '.join(ranks)} of it)"
    return f"{text} held another state than the others before this step"


def combine(hashes: Iterable[torch.Tensor]) -> int:
    """Return one fingerprint in ``range(2**64)`` of hashes in a fixed order."""
    return int(_folded(hashes)) & _MASK


def _folded(hashes: Iterable[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64)
    for each in hashes:
        total = total.to(each.device) * _FACTOR + each
    return total


_FACTOR = -7046029254386353131  # odd: multiplication modulo 2**64 loses no bit
_tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def hash_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit hash of the bytes of ``tensor``, as an int64 scalar on its device.

    The hash is the sum of its 64-bit words, each times an odd random number that depends on its
    position, modulo 2**64. It therefore changes with any single flipped bit, and with high
    probability if values are exchanged.
    """
    words = _as_words(tensor)
    if words.device not in _tables:
        _tables[words.device] = _make_tables(words.device)
    columns, rows = _tables[words.device]
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), _BLOCK):
        block = words[start : start + _BLOCK]
        first, full = start // _CHUNK, len(block) // _CHUNK
        if full:
            body = block[: full * _CHUNK].view(full, _CHUNK)
            sums = (body * columns).sum(1)
            total += (
                sums * rows[torch.arange(first, first + full, device=rows.device) % _CHUNK]
            ).sum()
        rest = block[full * _CHUNK :]
        if len(rest):
            total += (rest * columns[: len(rest)]).sum() * rows[(first + full) % _CHUNK]
    return total


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor`` as int64 words, padded with zeros; a view where possible."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if len(flat) % 8 == 0 and flat.storage_offset() % 8 == 0:
        return flat.view(torch.int64)
    padded = flat.new_zeros(-(-len(flat) // 8) * 8)
    padded[: len(flat)] = flat
    return padded.view(torch.int64)


def _make_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return odd random multipliers for the columns and rows of words, equal on all ranks."""
    generator = torch.Generator().manual_seed(20180)
    limits = torch.iinfo(torch.int64)
    size = 2, _CHUNK
    both = torch.randint(limits.min, limits.max, size, generator=generator, dtype=torch.int64) | 1
    columns, rows = both.to(device)
    return columns, rows


def _own_parameters(unit: nn.Module) -> Iterable[torch.Tensor]:
    """Yield the parameters of ``unit`` without those of units inside of it."""
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)
    yield from (value for value in unit._parameters.values() if value is not None)


def _halves(name: str, fingerprint: int) -> dict[str, float]:
    """Return a fingerprint as two numbers that float64 holds exactly."""
    return {
        f"{name}_high": float(fingerprint >> 32),
        f"{name}_low": float(fingerprint & 0xFFFFFFFF),
    }


def _joined(name: str, by_rank: Mapping[str, list[float]]) -> list[int]:
    high, low = by_rank[f"{name}_high"], by_rank[f"{name}_low"]
    return [(int(h) << 32) | int(each) for h, each in zip(high, low, strict=True)]


def _merge_close(values: list[float], groups: Mapping[Hashable, list[int]]) -> list[float | str]:
    """Replace values by the first one of their group that is equal up to `_TOLERANCE`.

    Norms are sums, whose order may be another one on other replicas.
    """
    merged: list[float | str] = list(map(str, values))
    for ranks in groups.values():
        first: list[float] = []
        for rank in ranks:
            value = values[rank]
            if math.isfinite(value):
                near = (each for each in first if math.isclose(each, value, rel_tol=_TOLERANCE))
                merged[rank] = next(near, value)
                first.append(value)
    return merged
