"""nearlinear: train models too big for one accelerator at near-linear scaling.

The public names live in the modules below and are imported on first use, so that
``import nearlinear`` (and ``nearlinear --help``) does not import torch. Type checkers and editors
read the imports under ``TYPE_CHECKING``; tests keep both lists equal.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import data as data
    from . import errors as errors
    from . import plots as plots
    from . import spmd as spmd
    from .activation.api import activation_offload_stats as activation_offload_stats
    from .activation.api import checkpoint_activations as checkpoint_activations
    from .activation.api import offload_activations as offload_activations
    from .checkpoint.hf.export import export_hf as export_hf
    from .checkpoint.hf.importing import import_hf as import_hf
    from .checkpoint.load import load as load
    from .checkpoint.save import save as save
    from .checkpoint.state import local_shards as local_shards
    from .config.parallel import ParallelConfig as ParallelConfig
    from .config.train import TrainConfig as TrainConfig
    from .distributed.collectives import count_collectives as count_collectives
    from .distributed.mesh import Mesh as Mesh
    from .distributed.runtime import init as init
    from .distributed.runtime import process_group as process_group
    from .distributed.runtime import shutdown as shutdown
    from .distributed.watchdog import watch_ranks as watch_ranks
    from .fsdp.accumulate import accumulate as accumulate
    from .fsdp.accumulate import accumulation as accumulation
    from .fsdp.clip_grad import clip_grad_norm_ as clip_grad_norm_
    from .fsdp.compile import compile_blocks as compile_blocks
    from .fsdp.deferred_init import deferred_init as deferred_init
    from .fsdp.float8 import convert_to_fp8 as convert_to_fp8
    from .fsdp.loss_scaler import loss_scaler as loss_scaler
    from .fsdp.optimizer_state import shard_optimizer as shard_optimizer
    from .fsdp.shard import shard as shard
    from .memory import memory_report as memory_report
    from .pipeline_parallel.api import pipeline as pipeline
    from .planner.api import plan as plan
    from .train.trainer import Trainer as Trainer
    from .transforms import transform as transform

__version__ = "0.1.0"

_EXPORTS = {
    "ParallelConfig": "config.parallel",
    "Mesh": "distributed.mesh",
    "TrainConfig": "config.train",
    "Trainer": "train.trainer",
    "accumulate": "fsdp.accumulate",
    "accumulation": "fsdp.accumulate",
    "activation_offload_stats": "activation.api",
    "checkpoint_activations": "activation.api",
    "clip_grad_norm_": "fsdp.clip_grad",
    "compile_blocks": "fsdp.compile",
    "convert_to_fp8": "fsdp.float8",
    "count_collectives": "distributed.collectives",
    "data": "",
    "deferred_init": "fsdp.deferred_init",
    "errors": "",
    "export_hf": "checkpoint.hf.export",
    "import_hf": "checkpoint.hf.importing",
    "init": "distributed.runtime",
    "load": "checkpoint.load",
    "local_shards": "checkpoint.state",
    "loss_scaler": "fsdp.loss_scaler",
    "memory_report": "memory",
    "offload_activations": "activation.api",
    "pipeline": "pipeline_parallel.api",
    "plan": "planner.api",
    "plots": "",
    "process_group": "distributed.runtime",
    "save": "checkpoint.save",
    "shard": "fsdp.shard",
    "shard_optimizer": "fsdp.optimizer_state",
    "shutdown": "distributed.runtime",
    "spmd": "",
    "transform": "transforms",
    "watch_ranks": "distributed.watchdog",
}
"""Module of each public name, relative to this package; "" for public modules."""

_DEPRECATED = {
    "Blend": "data.Mixture",
    "CheckpointError": "errors.CheckpointError",
    "Config": "config.parallel.ParallelConfig",
    "ConfigError": "errors.ConfigError",
    "DataError": "errors.DataError",
    "Loader": "data.Loader",
    "LossScaler": "fsdp.loss_scaler.LossScaler",
    "Masks": "data.Masks",
    "MoEConfig": "config.moe.MoEConfig",
    "NearlinearError": "errors.NearlinearError",
    "RankLost": "errors.RankFailure",
    "StepOutput": "compat.smp.StepOutput",
    "TokenDataset": "data.TokenDataset",
    "cu_seqlens": "data.masking.cu_seqlens",
    "current_mesh": "distributed.runtime.current_mesh",
    "delayed_init": "fsdp.deferred_init.deferred_init",
    "export_checkpoint": "checkpoint.hf.export.export_checkpoint",
    "held": "checkpoint.state.local_shards",
    "offload_peak": "activation.api.activation_offload_stats",
    "step": "compat.smp.step",
}
"""Former public names and their replacements. They go away in the next release."""

__all__ = ["__version__", *_EXPORTS]


if not TYPE_CHECKING:  # pyright then reports misspelled names

    def __getattr__(name: str):
        if name in _EXPORTS:
            module = _EXPORTS[name]
            value = import_module(f"nearlinear.{module or name}")
            value = getattr(value, name) if module else value
        elif name in _DEPRECATED:
            module, _, new_name = f"nearlinear.{_DEPRECATED[name]}".rpartition(".")
            value = getattr(import_module(module), new_name)
            public = f"nearlinear.{new_name}" if new_name in _EXPORTS else f"{module}.{new_name}"
            warnings.warn(
                f"nearlinear.{name} is deprecated: use {public}", DeprecationWarning, stacklevel=2
            )
            return value
        else:
            raise AttributeError(f"module 'nearlinear' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__():
    return sorted(__all__)
