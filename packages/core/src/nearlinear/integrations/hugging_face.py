"""A ``transformers.Trainer`` whose model is sharded, with two-hop synchronization.

::

    from nearlinear.integrations.hugging_face import Trainer

    trainer = Trainer(model, arguments, train_dataset=dataset, sharding={"hybrid_shard_degree": 8})

Subclasses of ``transformers.Trainer``, such as TRL's, take the mixin::

    class ShardedSFTTrainer(ShardedTrainerMixin, SFTTrainer): ...
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import SCHEDULER_NAME

from ..errors import ConfigError
from .accelerate import Accelerator
from .host import FOLDER, HostedModel, Sharding

log = logging.getLogger(__name__)

_REFUSED = {
    "fsdp": "Trainer's FSDP would shard the model, too; pass its degrees in sharding",
    "deepspeed": "DeepSpeed would shard the model, too",
    "parallelism_config": "accelerate's meshes do not know the shards; pass degrees in sharding",
    "torch_compile": "Trainer compiles the whole model; call nl.compile_blocks(model)",
    "auto_find_batch_size": "a sharded model cannot be unwrapped for another attempt",
    "fp16_full_eval": "it would convert the shards; evaluation uses the dtype of training",
    "bf16_full_eval": "it would convert the shards; evaluation uses the dtype of training",
}


_Base: Any = object  # of any class, for type checkers: the one it is mixed into


class ShardedTrainerMixin(_Base):
    """Mixed in before ``transformers.Trainer`` or a subclass: shards the model.

    Args:
        sharding: Config of `nearlinear.init`; default: shard over all ranks.
        args, kwargs: Those of the Trainer.

    A checkpoint contains the weights as ``save_pretrained`` writes them, and the folder
    ``nearlinear`` with the sharded state, which resumes at any layout. ``save_model`` is a
    collective call. Raises ConfigError for training arguments that shard, compile or convert the
    model in another way.
    """

    def __init__(self, *args, sharding: Sharding = None, **kwargs):
        self._sharding = sharding
        self._losses: list[torch.Tensor] = []
        """Losses of the step's micro-batches on this rank."""
        self._state_dict: dict[str, Any] | None = None
        """Whole state dict on rank 0 during a save, which Trainer writes there alone."""
        super().__init__(*args, **kwargs)
        causal = type(self.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        if self.label_smoother is not None and causal:
            # Trainer finds causal models by the name of their class, which sharding changes
            self.label_smoother = functools.partial(self.label_smoother, shift_labels=True)

    def create_accelerator_and_postprocess(self) -> None:
        _check_arguments(self.args)
        super().create_accelerator_and_postprocess()
        accumulation: dict[str, Any] = {
            **(self.args.accelerator_config.gradient_accumulation_kwargs or {}),
            "num_steps": 1,
        }
        self.accelerator = Accelerator(
            sharding=self._sharding,
            dataloader_config=self.accelerator.dataloader_config,
            gradient_accumulation_plugin=GradientAccumulationPlugin(**accumulation),
        )
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    @property
    def _hosted(self) -> HostedModel:
        """The model, once it is prepared."""
        assert self.accelerator.hosted is not None
        return self.accelerator.hosted

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the placement to sharding, which moves one unit at a time."""

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, None]:
        """Return a step's micro-batches, whose losses stay means: gradients are weighted."""
        return list(itertools.islice(epoch_iterator, num_batches)), None

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # clipping knows all meshes

    def train(self, *args, **kwargs) -> Any:
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.accelerator.hosted is not None:
                self.accelerator.hosted.abandon()

    def training_step(self, model: nn.Module, inputs: dict, *args, **kwargs) -> torch.Tensor:
        """Run a micro-batch; return the mean loss of its step if it is the last one, else zero."""
        hosted = self._hosted
        if not hosted.unfinished:
            self._losses.clear()
        hosted.batch = inputs
        given, self.current_gradient_accumulation_steps = (
            self.current_gradient_accumulation_steps,
            1,
        )
        try:
            loss = super().training_step(model, inputs)
        finally:
            self.current_gradient_accumulation_steps = given
        self._losses.append(loss)
        step = hosted.completed
        if hosted.unfinished or step is None:
            return torch.zeros_like(loss)
        pairs = zip(self._losses, step.counts, strict=True)
        total = sum((loss * count for loss, count in pairs if count), torch.zeros_like(loss))
        return total * self.accelerator.num_processes / step.targets

    def save_model(self, *args, **kwargs) -> None:
        if self.accelerator.hosted is not None:
            self._state_dict = self.accelerator.hosted.full_state_dict()
        try:
            super().save_model(*args, **kwargs)
        finally:
            self._state_dict = None

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, self._state_dict if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        step = self.state.global_step
        folder = os.path.join(output_dir, FOLDER)
        self._hosted.save(folder, self.optimizer.optimizer, step)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, folder: str, model: nn.Module | None = None) -> None:
        hosted = self.accelerator.hosted
        if hosted is None or hosted.model is not self.model:
            super()._load_from_checkpoint(folder, model)
        else:
            hosted.load(os.path.join(folder, FOLDER))

    def _load_best_model(self) -> None:
        self._hosted.load(os.path.join(self.state.best_model_checkpoint, FOLDER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        scheduler = os.path.join(checkpoint, SCHEDULER_NAME)
        if not os.path.isfile(scheduler):  # save_only_model
            log.warning("%s has no optimizer state: training resumes from its weights", checkpoint)
            return
        self._hosted.load(os.path.join(checkpoint, FOLDER), self.optimizer.optimizer)
        self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))


class Trainer(ShardedTrainerMixin, transformers.Trainer):
    """``transformers.Trainer`` with a sharded model, see `ShardedTrainerMixin`."""


def _check_arguments(args: transformers.TrainingArguments) -> None:
    """Raise ConfigError for training arguments that would change results or shard twice."""
    for name, reason in _REFUSED.items():
        value = getattr(args, name, None)
        if value:
            raise ConfigError(f"TrainingArguments({name}={value!r}) beside sharding: {reason}")
    if args.save_only_model and args.load_best_model_at_end:
        raise ConfigError(
            "save_only_model with load_best_model_at_end: the best model is loaded from its "
            "sharded state; leave save_only_model out"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"one process with {args.n_gpu} GPUs: start the script with torchrun, one process per "
            "GPU"
        )
