"""nearlinear: train models too big for one accelerator at near-linear scaling.

The public names live in the modules below and are imported on first use, so that
``import nearlinear`` (and ``nearlinear --help``) costs no torch import.
"""

from importlib import import_module

__version__ = "0.1.0"

_PUBLIC = {
    "Config": "config",
    "Mesh": "mesh",
    "init": "runtime",
    "current_mesh": "runtime",
    "spmd": None,
    "plan": None,
    "plots": None,
    "advise": "plan.advise",
    "transform": "parallel.transform",
    "shard": "parallel.shard",
    "pipeline": "parallel.pipeline.door",
    "step": "parallel.pipeline.step",
    "StepOutput": "parallel.pipeline.outputs",
    "accumulate": "parallel.accumulate",
    "checkpoint_activations": "parallel.activations.door",
    "offload_activations": "parallel.activations.door",
    "offload_peak": "parallel.activations.door",
    "clip_grad_norm_": "parallel.clip",
    "shard_optimizer": "parallel.optimizer_shards",
    "convert_to_fp8": "parallel.fp8",
    "compile_blocks": "parallel.compile",
    "LossScaler": "parallel.loss_scale",
    "loss_scaler": "parallel.loss_scale",
    "count_collectives": "counts",
    "delayed_init": "parallel.delayed_init",
    "MoEConfig": "moe",
    "memory_report": "memory.measure",
    "held": "checkpoint.state",
    "save": "checkpoint.save",
    "load": "checkpoint.load",
    "export_hf": "checkpoint.hf.export",
    "export_checkpoint": "checkpoint.hf.export",
    "import_hf": "checkpoint.hf.importing",
    "TokenDataset": "data.dataset",
    "Blend": "data.blend",
    "Loader": "data.loader",
    "Masks": "data.masking",
    "cu_seqlens": "data.masking",
    "TrainConfig": "train.config",
    "Trainer": "train.trainer",
    "watch_ranks": "watchdog.dog",
    "NearlinearError": "errors",
    "ConfigError": "errors",
    "DataError": "errors",
    "CheckpointError": "errors",
    "RankLost": "watchdog.alarm",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'nearlinear' has no attribute {name!r}")
    home = _PUBLIC[name]
    if home is None:
        value = import_module(f"nearlinear.{name}")
    else:
        value = getattr(import_module(f"nearlinear.{home}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
