"""`nl.pipeline`: make a rank's model its stages of the whole; `Pipelined` is what it is then."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from ... import runtime
from ...config import Config
from ...errors import ConfigError, NearlinearError
from .. import layout
from ..accumulate import count_targets
from ..delayed_init import require_built
from . import partition, tied
from .calls import Called, by_name, in_front
from .engine import Engine
from .losses import Losses
from .measure import measured
from .parts import parts_of
from .pieces import pieces
from .schedules import Plan, plan_for
from .stage import leave_out, passes_through, stage_of

log = logging.getLogger(__name__)


def pipeline(
    model: nn.Module,
    *,
    split: Sequence[int] | Mapping[int, int] | None = None,
    measure: bool = False,
    parts: Mapping | None = None,
) -> nn.Module:
    """Keep of ``model`` what this rank's stages hold, in place, and return it.

    ::

        pipe = nl.shard(nl.pipeline(model))
        optimizer = torch.optim.AdamW(pipe.parameters())
        for batch in nl.accumulate(pipe, micro_batches):
            loss = pipe.step(batch)
        optimizer.step()

    ``split``: the first block of every stage but the first, as in ``[3, 6, 9]``, or a dict from
    blocks to stages; default: found, see `partition`, by estimated costs or, with ``measure``, by
    those of one block of each kind on this machine. ``parts``: what comes before and after the
    blocks, for models that do not say so, see `parts`. Call it after `nearlinear.transform` and
    before `nearlinear.shard`; all ranks hold equal values, or none (`delayed_init`). Its ``str`` is
    the table of what landed where. Raises ConfigError.
    """
    require_built("nl.pipeline")
    now = runtime.current()
    config = now.config
    if isinstance(model, Pipelined):
        raise ConfigError("the model is a pipeline already: call nl.pipeline once")
    if hasattr(model, "_nearlinear_activations"):
        raise ConfigError("call nl.pipeline before nl.checkpoint_activations, and offload likewise")
    if hasattr(model, "_get_fsdp_state"):
        raise ConfigError("the model is sharded already: call nl.pipeline before nl.shard")
    found = parts_of(model, parts)
    if not passes_through(model, found, found.count(model)):
        raise ConfigError(
            f"nl.pipeline: {type(model).__name__} changes hidden states also between embedding, "
            "blocks, norm and head (a factor or a cap), which every stage would do again: set "
            "pipeline_parallel_degree = 1 and raise hybrid_shard_degree"
        )
    if measure and layout.of(model).axes:
        raise ConfigError(
            "nl.pipeline(measure=True) measures whole blocks: leave it out after nl.transform, or "
            "give split, as it was measured without"
        )
    plan = plan_for(
        config.pipeline, now.mesh.pipeline, config.virtual_pipeline_degree, config.microbatches
    )
    plan.require()
    plan.check(config.microbatches)
    costs = measured(model, found, now) if measure else partition.estimate(model, found)
    if split is None and config.auto_partition:
        cut = partition.split(costs, plan.stages, partition.memory_weight(config))
    else:
        default, blocks = config.default_partition, found.count(model)
        cut = partition.by_hand({} if split is None else split, blocks, plan.stages, default)
    place = now.mesh.coordinates(now.rank)["pipeline"]
    mine = plan.stages_of(place)
    ties = tied.ties_of(model, found) if plan.stages > 1 else []
    layout.of(model)  # one for all stages
    count = found.count(model)
    if {0, plan.stages - 1} <= set(mine):
        tied.untie(model, ties)
    stages = {number: stage_of(model, found, cut[number], count) for number in mine}
    leave_out(model, found, {block for number in mine for block in cut[number]}, count)
    active = plan.in_flight(config.active_microbatches, config.microbatches)
    model._nearlinear_pipeline = Engine(now, plan, found, cut, costs, ties, stages, active)
    model.__class__ = in_front(type(model), Pipelined)
    if now.rank == 0:
        _say(model, plan, config)
    return model


class Pipelined(Called):
    """In front of the model's class: this rank's part of a pipeline."""

    def step(self, batch: Mapping) -> torch.Tensor:
        """Forward and backward passes of ``batch``, the model's arguments; the loss, on every rank.

        Every pipeline rank gives the same batch, of ``microbatches`` equal parts along dim 0. The
        loss is the mean over the batch's targets, without a graph; gradients are there afterwards,
        or, inside `nearlinear.accumulate`, after its loop.
        """
        return self._through(batch, self._nearlinear_pipeline.run)

    def evaluate(self, batch: Mapping) -> torch.Tensor:
        """The loss of ``batch`` on every rank, as `step`, without gradients."""
        return self._through(batch, self._nearlinear_pipeline.evaluate)

    def last_logits(self, batch: Mapping) -> torch.Tensor:
        """The logits (B, V) of every sequence's last token, on every rank, without gradients."""
        engine, device = self._nearlinear_pipeline, self._nearlinear_pipeline.now.device
        (call,) = pieces(batch, 1, device)
        rows = next(iter(call.values())).shape[0]
        found = torch.empty(rows, self.config.vocab_size, device=device)
        engine.evaluate(self, [call], lambda i, output: found.copy_(output.logits[:, -1]))
        engine.tell(found)
        return found

    def blocks(self) -> list[nn.Module]:
        """The blocks of this rank's stages, in order."""
        engine = self._nearlinear_pipeline
        return [block for stage in engine.stages.values() for block in engine.blocks_of(stage)]

    def _through(self, batch: Mapping, go) -> torch.Tensor:
        engine = self._nearlinear_pipeline
        calls = pieces(batch, engine.now.config.microbatches, engine.now.device)
        losses = Losses(self, [count_targets(call) for call in calls])
        go(self, calls, losses.of(lambda i, output: _loss_of(output)))
        return losses.settle()

    def forward(self, *args, **kwargs):
        raise NearlinearError(
            "a pipelined model computes with a whole batch at once: call pipe.step(batch), "
            "pipe.evaluate(batch), or write the step under @nl.step"
        )

    def arguments(self, *args, **kwargs) -> dict:
        return by_name(super().forward, args, kwargs)

    def train(self, mode: bool = True) -> nn.Module:
        for stage in self._nearlinear_pipeline.stages.values():
            stage.train(mode)
        return super().train(mode)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's, under their names in the whole model; a tied one's copy is that one."""
        engine, dot = self._nearlinear_pipeline, prefix + "." * bool(prefix)
        copies = {dot + tie.copy: dot + tie.name for tie in engine.ties}
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if not (engine.ends_here and name in copies):
                yield copies.get(name, name), parameter

    def __str__(self) -> str:
        return str(self._nearlinear_pipeline)


def _loss_of(output) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    if loss is None:
        raise NearlinearError("the model returned no loss: give pipe.step a batch with labels")
    return loss


def _say(model: nn.Module, plan: Plan, config: Config) -> None:
    """What landed where, and what of the config is not as one might think."""
    log.info("pipeline:\n%s", model)
    if config.microbatches < plan.ranks:
        log.warning(
            "microbatches = %d on %d ranks of a pipeline: some always wait; use a multiple of %d",
            config.microbatches,
            plan.ranks,
            plan.ranks,
        )
    if config.active_microbatches and not plan.schedule.all_at_once:
        log.info(
            "active_microbatches = %d: schedule %s itself decides how many are in flight, about as "
            "many as there are stages",
            config.active_microbatches,
            plan.name,
        )
