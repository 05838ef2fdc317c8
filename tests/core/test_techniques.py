"""Every technique that makes a model fit, every pair of them: the gradients are the plain run's.

On 2 shards x 2 replicas, over two micro-batches a step, with dropout. What has fewer digits is held
against itself without the other technique.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

import nearlinear as nl
from nearlinear import runtime
from nearlinear.checkpoint.pieces import Piece, blocks
from tests.support import activations, parity

LAYOUT = {"hybrid_shard_degree": 2}
RANKS, MICRO_BATCHES = 4, 2


@dataclass(frozen=True)
class Technique:
    """What is asked for, where; of one ``kind`` there can be one at a time."""

    kind: str
    config: dict = field(default_factory=dict)
    prepare: Callable = lambda model: None
    then: Callable = lambda model: None


def recomputed(strategy: str | int) -> Technique:
    return Technique("recomputed", then=lambda model: nl.checkpoint_activations(model, strategy))


def offloaded(**config) -> Technique:
    then = functools.partial(nl.offload_activations, horizon=1, smallest=1)
    return Technique("offloaded", config, then=then)


TECHNIQUES = {
    "each": recomputed("each"),
    "group_2": recomputed("group_2"),
    "contiguous": recomputed("contiguous"),
    "selective": recomputed("selective"),
    "budget": recomputed(150_000),
    "offloaded": offloaded(),
    "save_on_cpu": offloaded(sm_activation_offloading=False),
    "sliced_optimizer": Technique("optimizer", {"shard_optimizer_state": True}),
    "optimizer_on_host": Technique("optimizer", {"offload_optimizer": True}),
    "bf16": Technique("digits", {"bf16": True}),
    "fp16": Technique("digits", {"fp16": True, "init_scale": 1024.0}),
    "compiled": Technique(
        "compiled", prepare=functools.partial(nl.compile_blocks, backend="aot_eager")
    ),
}
ALONE = {"contiguous", "save_on_cpu"}  # a group of all blocks; PyTorch's own
ROUNDING = {"bf16": 1e-2, "fp16": 2e-3}
PAIRS = [
    (one, other)
    for one, other in itertools.combinations(TECHNIQUES, 2)
    if not ALONE & {one, other} and TECHNIQUES[one].kind != TECHNIQUES[other].kind
]
ALL = [(), *((name,) for name in TECHNIQUES), *PAIRS]
Gradients = dict[str, torch.Tensor]


def config_of(names: tuple[str, ...]) -> list[tuple]:
    """What `nearlinear.init` is given; to be sorted by."""
    asked = functools.reduce(dict.__or__, (TECHNIQUES[name].config for name in names), LAYOUT)
    return sorted(asked.items())


def trained(rank: int, family: str, names: tuple[str, ...], take: Callable) -> tuple[list, object]:
    """Losses of a step with the techniques ``names``, and ``take(model)`` of its gradients."""
    asked, mesh = [TECHNIQUES[name] for name in names], runtime.current_mesh()
    model = nl.transform(activations.build(family))
    for each in asked:
        each.prepare(model)
    model = nl.shard(model)
    for each in asked:
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
    """Losses of ``rank`` and whole gradients, by plain PyTorch in one process."""
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
    """Of a micro-batch's dropout."""
    torch.manual_seed(10 * rank + micro_batch)


def differences(rank: int, family: str) -> dict[tuple[str, ...], tuple[float, float]]:
    """Of losses and of gradients, by techniques: the largest that this rank sees.

    From the plain run; with fewer digits from the run that has nothing but them.
    """
    torch._dynamo.reset()
    of_plain, of_digits, found = alone(rank, family), {}, {}
    whole = functools.partial(parity.whole, of=parity.gradient)
    for config, together in itertools.groupby(sorted(ALL, key=config_of), key=config_of):
        nl.init(dict(config))
        for names in together:
            digits = next((name for name in names if TECHNIQUES[name].kind == "digits"), None)
            if digits and len(names) == 1:
                of_digits[digits] = trained(rank, family, names, whole)
            losses, gradients = of_digits[digits] if digits and len(names) > 1 else of_plain
            take = functools.partial(apart, expected=gradients)
            run = trained(rank, family, names, take)
            of_losses = max(abs(a - b) for a, b in zip(run[0], losses, strict=True))
            found[names] = of_losses, run[1]
    return found


def apart(model, expected: Gradients) -> float:
    """The largest difference of any number that this rank has of the gradients."""
    largest = 0.0
    for name, parameter in model.named_parameters():
        there = expected[name]
        for piece, block in blocks(parity.gradient(parameter)).items():
            difference = block - there[piece.inside(Piece.whole(there.shape))]
            largest = max(largest, difference.abs().max().item())
    return largest


def of_families(rank: int, families: list[str]) -> list[dict]:
    return [differences(rank, family) for family in families]


def bound(names: tuple[str, ...]) -> float:
    """How far losses and gradients may be from what they are compared with."""
    coarse = [ROUNDING[name] for name in names if name in ROUNDING]
    return coarse[0] if coarse and (len(names) == 1 or "compiled" in names) else 1e-6


@pytest.mark.slow
def test_every_technique_and_every_pair():
    families = list(activations.DROPOUT)
    found = nl.spmd.run(of_families, RANKS, args=(families,), processes=True, timeout=1500)
    for family, of_ranks in zip(families, zip(*found, strict=True), strict=True):
        for names in ALL:
            losses, gradients = (max(each[names][k] for each in of_ranks) for k in (0, 1))
            where = f"{family}, {' and '.join(names) or 'plain'}"
            assert max(losses, gradients) <= bound(names), f"{where}: {losses:g}, {gradients:g}"
