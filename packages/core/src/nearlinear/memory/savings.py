"""What each knob would save of what was measured: estimates, each with its formula.

All are of this rank, in bytes, and of one knob turned alone. A is what the ``n`` blocks have saved
together, of which checkpointing keeps an input per block; of the block that is being recomputed
there is everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import Config
from ..mesh import Mesh

Parts = dict[str, int]
HALF_BYTES = 2  # of a number in bfloat16


@dataclass(frozen=True)
class Facts:
    """What the estimates need to know beside the measured parts."""

    config: Config
    mesh: Mesh
    units: tuple[int, ...]
    """parameters of the root, then of each block, on this rank when gathered"""
    input_bytes: int
    """hidden states that enter a block, of all micro-batches in flight"""
    products_bytes: int
    """what the matrices of a block, and its attention, put out for those"""
    rows: int
    """sequences of a micro-batch"""
    item_bytes: int
    """of a number that a block computes with"""
    gradient_bytes: int
    """of a number of a reduced gradient"""

    @property
    def blocks(self) -> int:
        return len(self.units) - 1


@dataclass(frozen=True)
class Saving:
    """What turning one knob would save."""

    knob: str
    bytes: int


def savings(parts: Parts, facts: Facts) -> list[Saving]:
    """The knobs that would save something, the largest first."""
    found = [Saving(knob, int(size)) for knob, size in _all(parts, facts)]
    least = sum(parts.values()) // 200  # half a percent is not worth a line
    return sorted((s for s in found if s.bytes > least), key=lambda s: -s.bytes)


def _all(parts: Parts, facts: Facts) -> Iterator[tuple[str, float]]:
    config, mesh, n = facts.config, facts.mesh, facts.blocks
    if mesh.replicate % 2 == 0:
        yield f"hybrid_shard_degree = {2 * mesh.sharing}", wider_shards(parts)
    if mesh.replicate > 1 and not config.shard_optimizer_state:
        yield "shard_optimizer_state = true", states_over_replicas(parts, mesh.replicate)
    if facts.gradient_bytes > HALF_BYTES:
        yield "gradients in bfloat16", parts["gradients"] * (1 - HALF_BYTES / facts.gradient_bytes)
    activations, kept = parts["activations"], facts.input_bytes
    yield 'activations.checkpoint = "each"', recomputed(activations, n, kept)
    kept += facts.products_bytes
    yield 'activations.checkpoint = "selective"', recomputed(activations, n, kept)
    horizon = config.activation_loading_horizon
    yield f"activations.offload = true, horizon {horizon}", offloaded(activations, n, horizon)
    if facts.item_bytes > HALF_BYTES:
        yield "bf16 = true", halved(parts)
    if facts.rows > 1:
        yield "micro-batch of half the size", smaller_batch(parts)
    yield "sdp_max_live_parameters = 0", least_gathered(parts, facts)


def wider_shards(parts: Parts) -> float:
    """Twice the ranks share one copy: half of parameters, gradients and optimizer states."""
    return (parts["parameters"] + parts["gradients"] + parts["optimizer"]) / 2


def states_over_replicas(parts: Parts, replicas: int) -> float:
    """Each of R replicas keeps its part of the shard's optimizer states: O (1 - 1/R)."""
    return parts["optimizer"] * (1 - 1 / replicas)


def recomputed(activations: int, blocks: int, kept: int) -> float:
    """All blocks but the one being recomputed keep ``kept`` bytes: (n - 1) (A/n - kept)."""
    return (blocks - 1) * (activations / blocks - kept)


def offloaded(activations: int, blocks: int, horizon: int) -> float:
    """Only ``horizon`` + 1 blocks' activations are on the device: A (1 - (horizon + 1)/n)."""
    return activations * max(0.0, 1 - (horizon + 1) / blocks)


def halved(parts: Parts) -> float:
    """Numbers of 2 bytes instead of 4 in blocks and gathers: half; the loss stays in float32."""
    return (parts["activations"] + parts["gathered"]) / 2


def smaller_batch(parts: Parts) -> float:
    """Half of what grows with the batch: activations, and logits and loss."""
    return (parts["activations"] + parts["logits"]) / 2


def least_gathered(parts: Parts, facts: Facts) -> float:
    """Gathered are then the root, the block that computes, and ``prefetch_depth`` ahead of it."""
    root, *blocks = facts.units
    moving = (1 + facts.config.prefetch_depth) * max(blocks)
    return parts["gathered"] - facts.item_bytes * (root + moving)
