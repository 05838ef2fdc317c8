"""The memory of a config in closed form: sums over shapes, in milliseconds.

No model is built and nothing allocated. States are exact; a step's peak is found by going through
it unit by unit (`step`) with what blocks save and need as their code says (`blocks`).
"""

from __future__ import annotations

import math
import os
from functools import partial

from ...config import Config
from ...data.format import Manifest
from ...errors import DataError
from ...memory.states import AVERAGES, VALUE
from ...mesh import Mesh
from ...parallel.activations import strategy
from ...schema import coerce
from ...train import config as train_config
from ...train.config import TrainConfig
from .. import shape as shapes
from ..shape import Shape
from .blocks import Sizes, block, head
from .ledger import Ledger
from .report import NAMES, MemoryPlan, Unknown, reserve
from .step import Kept, Model, Step
from .units import Unit, block_of, buffer_bytes, root_of

ITEM = {"fp32": 4, "bf16": 2, "fp16": 2}
COUNT = 4  # bytes of a parameter's count of steps, which AdamW keeps


def estimate(
    config: TrainConfig | dict | str | os.PathLike, world_size: int, *, vocabulary: int = 0
) -> MemoryPlan:
    """The memory of the GPU that needs the most, of ``world_size``, in a step of ``config``.

    ``vocabulary``: ids; 0: what `vocabulary_of` finds. Raises ConfigError for a config that cannot
    be, and Unknown for what the closed form does not know: pipelines, mixtures of experts, families
    of models beyond `blocks`.
    """
    asked = config if isinstance(config, TrainConfig) else train_config.load(config)
    mesh = Mesh.from_config(asked.parallel, world_size)
    family, item = asked.model.family, ITEM[asked.parallel.precision]
    shape = shapes.of_model(asked.model, vocabulary or vocabulary_of(asked))
    _refuse(mesh, shape)
    sequence = math.ceil(asked.sequence_length / mesh.context)
    tokens = asked.batch.micro_batch_size * sequence
    sizes = Sizes(shape, tokens, mesh.tensor, item)
    model = _model(family, sizes)
    units = [model.root] + [model.block] * shape.layers
    ledger = Ledger()
    micro_batches = min(2, asked.batch.micro_batches(mesh.data_ranks))
    persistent = _states(asked, mesh, units, buffer_bytes(family, shape), ledger)
    step = Step(model, _kept(asked, model), asked.parallel, ledger, mesh.sharing, item)
    step.run(micro_batches, partial(_gradient_bytes, asked.parallel, mesh, micro_batches))
    ledger.moment = "in the update of the parameters"
    ledger.look(update=_update(asked, mesh, units))
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


def _refuse(mesh: Mesh, shape: Shape) -> None:
    """Raise Unknown for what the closed form does not know."""
    for what, is_there in (("pipelines", mesh.pipeline > 1), ("experts", shape.experts > 1)):
        if is_there:
            raise Unknown(f"the planner's closed form of memory does not know {what} yet")


def _model(family: str, sizes: Sizes) -> Model:
    shape = sizes.shape
    root = root_of(family, shape, sizes.tensor)
    words = math.ceil(shape.vocabulary / sizes.tensor)
    return Model(
        root=root,
        block=block_of(family, shape, sizes.tensor),
        blocks=shape.layers,
        tied=shape.tied,
        calls=block(family, sizes),
        head=head(family, sizes),
        hidden=sizes.hidden,
        first=sizes.tokens * shape.width * sizes.item,  # of all tokens: a rank's rows are a view
        table=words * shape.width * sizes.item,
    )


def _kept(config: TrainConfig, model: Model) -> Kept:
    """Of activations, as the table [activations] has them."""
    asked, n, calls = config.activations, model.blocks, model.calls
    resident = config.parallel.activation_loading_horizon + 1 if asked.offload else None
    if not asked.checkpoint:
        return Kept(resident=resident)
    plan = strategy.parse(asked.checkpoint)
    if plan.budget is not None:  # `parallel.activations.budget`, of equal blocks
        over, saves = n * calls.kept_bytes - plan.budget, calls.kept_bytes - model.hidden
        return Kept(again=1, until=min(n, max(0, math.ceil(over / saves))), resident=resident)
    products = sum(value.bytes for value in calls.products) if plan.selective else 0
    return Kept(products, plan.together or n, resident=resident)


def _states(config: TrainConfig, mesh: Mesh, units: list[Unit], buffers: int, ledger) -> int:
    """Enter what is there between steps; its bytes."""
    parallel, ranks = config.parallel, mesh.sharing
    elements = sum(unit.shard(ranks) for unit in units)
    updated = elements
    if parallel.shard_optimizer_state:
        updated = sum(unit.slice(ranks, mesh.replicate) for unit in units)
    count = sum(len(unit.parameters) for unit in units) * COUNT
    averages = math.ceil(updated * AVERAGES[config.optimizer.kind]) + count
    if parallel.offload_optimizer:
        elements = averages = 0
    ledger.add("parameters", elements * VALUE + buffers)
    ledger.add("optimizer", averages)
    return sum(ledger.now.values())


def _gradient_bytes(parallel: Config, mesh: Mesh, micro_batches: int, unit: Unit) -> int:
    """Of a unit, reduced: in host memory, or a slice, where the config says so."""
    if parallel.offload_optimizer:
        return 0
    if parallel.shard_optimizer_state and micro_batches == 1:
        return unit.slice(mesh.sharing, mesh.replicate) * VALUE
    return unit.shard(mesh.sharing) * VALUE


def _update(config: TrainConfig, mesh: Mesh, units: list[Unit]) -> int:
    """Temporaries of AdamW: none where it is one kernel; a copy or two of what it works on."""
    largest = max(
        math.ceil(dims[0] / mesh.sharing) * math.prod(dims[1:])
        for unit in units
        for dims in unit.parameters
    )
    everything = sum(unit.shard(mesh.sharing) for unit in units)
    ways = {"foreach": everything, "for_loop": 2 * largest}
    return VALUE * ways.get(config.optimizer.implementation, 0)
