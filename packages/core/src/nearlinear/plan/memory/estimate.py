"""The memory of a config in closed form: sums over shapes, in milliseconds.

No model is built and nothing allocated. States are exact; a step's peak is found by going through
it unit by unit (`step`) with what blocks save and need as their code says (`blocks`).
"""

from __future__ import annotations

import dataclasses
import math
import os
from functools import partial

from ...data.format import Manifest
from ...errors import DataError
from ...mesh import Mesh
from ...schema import coerce
from ...train import config as train_config
from ...train.config import TrainConfig
from .. import shape as shapes
from .blocks import known_as
from .ledger import Ledger
from .pipeline import pipelined
from .rank import Rank
from .report import NAMES, MemoryPlan, reserve
from .step import Model, Step
from .units import Unit, root_of, table_of


def estimate(
    config: TrainConfig | dict | str | os.PathLike, world_size: int, *, vocabulary: int = 0
) -> MemoryPlan:
    """The memory of the GPU that needs the most, of ``world_size``, in a step of ``config``.

    ``vocabulary``: ids; 0: what `vocabulary_of` finds. What is less than exact says so, see
    `MemoryPlan.rough`. Raises ConfigError for a config that cannot be.
    """
    asked = config if isinstance(config, TrainConfig) else train_config.load(config)
    mesh = Mesh.from_config(asked.parallel, world_size)
    shape = shapes.of_model(asked.model, vocabulary or vocabulary_of(asked))
    family = known_as(asked.model.family, shape)
    rank = Rank(asked, mesh, shape, family)
    plan = pipelined(rank) if mesh.pipeline > 1 else _whole(rank)
    reasons = [plan.rough] if plan.rough else []
    reasons += [why for why, asked in _not_compared(asked, mesh) if asked]
    if family != asked.model.family:
        reasons.append(
            f"{asked.model.family} is counted as {family}, the family that is known here with such "
            "keys"
        )
    return dataclasses.replace(plan, rough="; ".join(reasons))


def _not_compared(config: TrainConfig, mesh: Mesh) -> tuple[tuple[str, bool], ...]:
    """What nobody has held against a dry run, or what one has shown to be far off."""
    selective = config.activations.checkpoint == "selective"
    return (
        ("blocks that are compiled are counted as written, though fused operators keep less",
         config.train.compile_blocks),
        ("casts to float8 are not counted", config.parallel.fp8),
        ("what offloading leaves on the device follows from its horizon, and was not measured on a "
         "GPU", config.activations.offload),
        ("selective checkpointing over context ranks keeps parts of attention that are not "
         "counted, up to a tenth of the peak", selective and mesh.context > 1),
    )  # fmt: skip


def _whole(rank: Rank) -> MemoryPlan:
    """Of a rank that has every block."""
    family, shape, mesh, sizes = rank.family, rank.shape, rank.mesh, rank.sizes
    root = Unit(root_of(family, shape, mesh.tensor), mesh.sharing)
    table = math.prod(table_of(shape, mesh.tensor)) * rank.item
    model = Model(
        root=root,
        block=rank.block,
        blocks=shape.layers,
        tied=shape.tied,
        activations=rank.activations(shape.layers, sizes.embedded),
        head=rank.head,
        table=table,
    )
    units = [root, *rank.block * shape.layers]
    ledger = Ledger()
    micro_batches = min(2, rank.config.batch.micro_batches(mesh.data_ranks))
    persistent = rank.enter_states(units, ledger)
    step = Step(model, rank.config.parallel, ledger, rank.item)
    step.run(micro_batches, partial(rank.gradient_bytes, micro_batches))
    ledger.moment = "in the update of the parameters"
    ledger.look(update=rank.update_bytes(units))
    parts = dict.fromkeys(NAMES, 0) | ledger.at_peak
    return MemoryPlan(parts, persistent, ledger.moment_of_peak, reserve(ledger.peak))


def vocabulary_of(config: TrainConfig) -> int:
    """Ids of what ``config`` trains: its data's, or else its family's as published.

    Raises ConfigError where neither is known.
    """
    asked = config.model.overrides.get("vocab_size")
    if asked:
        return coerce(asked, int, "model.overrides.vocab_size")
    if config.data.folder:
        try:
            asked = Manifest.read(config.data.folder).vocab_size
        except DataError:  # not prepared yet
            asked = 0
    return asked or shapes.of_model(config.model).vocabulary
