"""Gradients of every memory-saving technique, and of every pair, equal the plain run.

Pairs run with GPT-2, single techniques with Llama too. Runs use 2 shards x 2 replicas, two
micro-batches per step, and dropout. A pair with reduced precision is compared with the same
precision without the second technique.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

import nearlinear as nl
from nearlinear.checkpoint.shards import TensorShard, local_tensor_shards
from nearlinear.distributed import runtime
from tests.support import activations, parity

LAYOUT = {"hybrid_shard_degree": 2}
RANKS, MICRO_BATCHES = 4, 2


@dataclass(frozen=True)
class Technique:
    """Config and calls that enable one technique. Techniques of one ``kind`` exclude each other."""

    kind: str
    config: dict = field(default_factory=dict)
    prepare: Callable = lambda model: None
    then: Callable = lambda model: None


def checkpointed(strategy: str | int) -> Technique:
    return Technique("recomputed", then=lambda model: nl.checkpoint_activations(model, strategy))


def offloaded(**config) -> Technique:
    then = functools.partial(nl.offload_activations, horizon=1, smallest=1)
    return Technique("offloaded", config, then=then)


TECHNIQUES = {
    "each": checkpointed("each"),
    "group_2": checkpointed("group_2"),
    "contiguous": checkpointed("contiguous"),
    "selective": checkpointed("selective"),
    "budget": checkpointed(150_000),
    "offloaded": offloaded(),
    "save_on_cpu": offloaded(sm_activation_offloading=False),
    "sliced_optimizer": Technique("optimizer", {"shard_optimizer_state": True}),
    "optimizer_on_host": Technique("optimizer", {"offload_optimizer": True}),
    "bf16": Technique("precision", {"bf16": True}),
    "fp16": Technique("precision", {"fp16": True, "init_scale": 1024.0}),
    "compiled": Technique(
        "compiled", prepare=functools.partial(nl.compile_blocks, backend="aot_eager")
    ),
}
ALONE = {"contiguous", "save_on_cpu"}  # one group of all blocks; PyTorch's implementation
ROUNDING = {"bf16": 1e-2, "fp16": 2e-3}
PAIRS = [
    (one, other)
    for one, other in itertools.combinations(TECHNIQUES, 2)
    if not ALONE & {one, other} and TECHNIQUES[one].kind != TECHNIQUES[other].kind
]
SINGLE = [(), *((name,) for name in TECHNIQUES)]
RUNS = {"gpt2": [*SINGLE, *PAIRS], "llama": SINGLE}
"""Combinations of techniques by model family."""
Gradients = dict[str, torch.Tensor]


def config_of(names: tuple[str, ...]) -> list[tuple]:
    """Return the config for `nearlinear.init` as a sort key."""
    requested = functools.reduce(dict.__or__, (TECHNIQUES[name].config for name in names), LAYOUT)
    return sorted(requested.items())


def trained(rank: int, family: str, names: tuple[str, ...], take: Callable) -> tuple[list, object]:
    """Return losses of a step with techniques ``names``, and ``take(model)`` after backward."""
    requested, mesh = [TECHNIQUES[name] for name in names], runtime.current_mesh()
    model = nl.transform(activations.build(family))
    for each in requested:
        each.prepare(model)
    model = nl.shard(model)
    for each in requested:
        each.then(model)
    optimizer = nl.shard_optimizer(parity.adamw(model, 1e-3), model)
    mine = parity.split(parity.rows(0), mesh.data_ranks)[mesh.data_rank(rank)]
    losses = []
    for number, batch in enumerate(nl.accumulate(model, parity.split(mine, MICRO_BATCHES))):
        seed(rank, number)
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
    taken = take(model)
    optimizer.step()
    return losses, taken


def alone(rank: int, family: str) -> tuple[list[float], Gradients]:
    """Return losses of ``rank`` and full gradients of plain PyTorch in one process."""
    model = activations.build(family)
    losses, targets = [], int((parity.rows(0)["labels"][:, 1:] != -100).sum())
    for other, mine in enumerate(parity.split(parity.rows(0), RANKS)):
        for number, batch in enumerate(parity.split(mine, MICRO_BATCHES)):
            seed(other, number)
            loss = model(**batch).loss
            (loss * int((batch["labels"][:, 1:] != -100).sum()) / targets).backward()
            losses += [loss.item()] if other == rank else []
    return losses, {name: p.grad.clone() for name, p in model.named_parameters()}


def seed(rank: int, micro_batch: int) -> None:
    """Seed the dropout of a micro-batch."""
    torch.manual_seed(10 * rank + micro_batch)


def differences(rank: int, family: str) -> dict[tuple[str, ...], tuple[float, float]]:
    """Return the largest differences of losses and gradients on this rank, by technique.

    The reference is the plain run, or for reduced precision the run with that precision only.
    """
    torch._dynamo.reset()
    plain_results, precision_results, found = alone(rank, family), {}, {}
    whole = functools.partial(parity.whole, of=parity.gradient)
    for config, together in itertools.groupby(sorted(RUNS[family], key=config_of), key=config_of):
        nl.init(dict(config))
        for names in together:
            precision = next((name for name in names if TECHNIQUES[name].kind == "precision"), None)
            if precision and len(names) == 1:
                precision_results[precision] = trained(rank, family, names, whole)
            losses, gradients = (
                precision_results[precision] if precision and len(names) > 1 else plain_results
            )
            take = functools.partial(gradient_difference, expected=gradients)
            run = trained(rank, family, names, take)
            loss_difference = max(abs(a - b) for a, b in zip(run[0], losses, strict=True))
            found[names] = loss_difference, run[1]
    return found


def gradient_difference(model, expected: Gradients) -> float:
    """Return the largest difference of this rank's gradient shards."""
    largest = 0.0
    for name, parameter in model.named_parameters():
        there = expected[name]
        for piece, block in local_tensor_shards(parity.gradient(parameter)).items():
            difference = block - there[piece.slices_in(TensorShard.full(there.shape))]
            largest = max(largest, difference.abs().max().item())
    return largest


def all_differences(rank: int, families: list[str]) -> list[dict]:
    return [differences(rank, family) for family in families]


def bound(names: tuple[str, ...]) -> float:
    """Return the tolerance of losses and gradients."""
    coarse = [ROUNDING[name] for name in names if name in ROUNDING]
    return coarse[0] if coarse and (len(names) == 1 or "compiled" in names) else 1e-6


@pytest.mark.slow
def test_gradients_of_every_technique_and_pair_equal_the_plain_run():
    families = list(RUNS)
    found = nl.spmd.run(all_differences, RANKS, args=(families,), processes=True, timeout=1500)
    for family, rank_results in zip(families, zip(*found, strict=True), strict=True):
        for names in RUNS[family]:
            losses, gradients = (max(each[names][k] for each in rank_results) for k in (0, 1))
            where = f"{family}, {' and '.join(names) or 'plain'}"
            assert max(losses, gradients) <= bound(names), f"{where}: {losses:g}, {gradients:g}"
