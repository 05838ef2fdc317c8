"""A strategy of Lightning whose model is sharded, with two-hop synchronization, also on the CPU.

::

    from nearlinear.integrations.lightning import ShardedStrategy

    trainer = Trainer(strategy=ShardedStrategy({"hybrid_shard_degree": 8}))
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl  # pyright: ignore[reportMissingImports] - optional
import torch
from torch import nn

from ..errors import ConfigError
from .host import FOLDER, HostedModel, Sharding, join


class ShardedStrategy(pl.strategies.DDPStrategy):
    """Shards the module that a LightningModule trains, and synchronizes replicas once per step.

    The sharded module is the only child with trainable parameters, as in ``self.net = ...``; with
    several of them it is the LightningModule, whose ``training_step`` then calls ``self(...)``.

    A checkpoint ``NAME.ckpt`` is that of Lightning without optimizer state, which lies beside it in
    ``NAME.ckpt.nearlinear`` and resumes at any layout.

    Args:
        sharding: Config of `nearlinear.init`; default: shard over all ranks. The compute dtype is
            set here, as in ``{"bf16": True}``, and not by the trainer's ``precision``.
        two_hop: As in `nearlinear.accumulate`.
        options: ``process_group_backend``, ``timeout`` and ``start_method`` of ``DDPStrategy``.
    """

    def __init__(self, sharding: Sharding = None, *, two_hop: bool = True, **options):
        for name in options.keys() - {"process_group_backend", "timeout", "start_method"}:
            raise ConfigError(
                f"ShardedStrategy({name}=...): DDP does not reduce the gradients here"
            )
        super().__init__(**options)
        self.sharding, self.two_hop = sharding, two_hop
        self.hosted: HostedModel | None = None
        self._defers_sync = False
        self._loaded: str = ""
        """Checkpoint that the trainer restores."""

    def setup_environment(self) -> None:
        super().setup_environment()
        if type(self.precision_plugin) not in (pl.plugins.Precision, _ShardedPrecision):
            raise ConfigError(
                f"precision={self.precision_plugin.precision!r} with ShardedStrategy: leave it "
                'out, and set the compute dtype of the blocks by ShardedStrategy({"bf16": True})'
            )
        self.precision_plugin = _ShardedPrecision(self)
        join(self.sharding, "Lightning")

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        if self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        hosted = self._host()
        if trainer.state.fn == pl.trainer.states.TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            if len(self.optimizers) > 1:
                raise ConfigError(
                    f"{len(self.optimizers)} optimizers with ShardedStrategy: only one is allowed; "
                    "give parameters groups of one optimizer"
                )
            for optimizer in self.optimizers:
                hosted.adopt_optimizer(optimizer)
        self.setup_precision_plugin()

    def _host(self) -> HostedModel:
        """Shard the trained module and move the others to the device."""
        whole = self.lightning_module
        assert whole is not None
        if pl.utilities.model_helpers.is_overridden("backward", whole):
            raise ConfigError(
                f"{type(whole).__name__}.backward with ShardedStrategy: the strategy runs the "
                "backward pass, to weight its gradients; remove the method"
            )
        trained = _trained_module(whole)
        if self.hosted is None or self.hosted.model is not trained:
            if self.hosted is not None:
                self.hosted.release()
            self.hosted = HostedModel(trained, lambda: not self._defers_sync, self.two_hop)
        if trained is not whole:
            for child in whole.children():
                if child is not trained:
                    child.to(self.root_device)
        return self.hosted

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._defers_sync = True
        try:
            yield
        finally:
            self._defers_sync = False

    def backward(
        self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args, **kwargs
    ) -> torch.Tensor:
        if args or kwargs:
            raise ConfigError("a backward pass with arguments: ShardedStrategy takes the loss only")
        module, precision = self.lightning_module, self.precision_plugin
        assert module is not None and self.hosted is not None
        closure_loss = precision.pre_backward(closure_loss, module)
        parts = module.trainer.accumulate_grad_batches if module.automatic_optimization else 1
        self.hosted.backward(closure_loss, 1 / parts)
        return precision.post_backward(closure_loss, module)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        whole = self.lightning_module
        assert whole is not None
        if self.hosted is None:
            return super().lightning_module_state_dict()
        trained = self.hosted.full_state_dict()
        prefix = next(
            f"{n}." if n else "" for n, m in whole.named_modules() if m is self.hosted.model
        )
        if not prefix:
            return trained
        others = {n: v for n, v in whole.state_dict().items() if not n.startswith(prefix)}
        return others | {prefix + name: value for name, value in trained.items()}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}  # in the sharded state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        assert self.hosted is not None
        filepath = self.broadcast(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if "optimizer_states" in checkpoint:  # not weights only
            optimizer = next(iter(self.optimizers), None)
            self.hosted.save(_beside(filepath), optimizer, checkpoint["global_step"])

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, *args, **kwargs) -> dict:
        self._loaded = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.hosted is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self.hosted.load(_beside(self._loaded))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.hosted is not None
        self.hosted.load(_beside(self._loaded), next(iter(self.optimizers), None))

    def on_exception(self, exception: BaseException) -> None:
        self._abandon()

    def on_train_end(self) -> None:
        self._abandon()

    def _abandon(self) -> None:
        if self.hosted is not None:
            self.hosted.abandon()

    def teardown(self) -> None:
        """Leave the shards where they are; Lightning would move them to the CPU."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


class _ShardedPrecision(pl.plugins.Precision):
    """Runs the closure before the optimizer's step, and clips over all shards."""

    def __init__(self, strategy: ShardedStrategy):
        self.strategy = strategy

    def optimizer_step(
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs
    ) -> Any:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError("LBFGS with ShardedStrategy: it evaluates the loss within a step")
        result = self._wrap_closure(model, optimizer, closure)
        if result is not None or not model.automatic_optimization:
            optimizer.step(**kwargs)
        return result

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float = 0.0) -> None:
        assert self.strategy.hosted is not None
        self.strategy.hosted.clip_grad_norm(clip_val)

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float = 0.0) -> None:
        assert self.strategy.hosted is not None
        self.strategy.hosted.clip_grad_value(clip_val)


def _trained_module(whole: nn.Module) -> nn.Module:
    """Return the only child that holds all trainable parameters of ``whole``, or ``whole``."""

    def trains(module: nn.Module, recurse: bool = True) -> bool:
        return any(parameter.requires_grad for parameter in module.parameters(recurse))

    trained = [child for child in whole.children() if trains(child)]
    return trained[0] if len(trained) == 1 and not trains(whole, recurse=False) else whole


def _beside(filepath: Any) -> str:
    """Return the folder of the sharded state beside a checkpoint."""
    return f"{os.fspath(filepath)}.{FOLDER}"
