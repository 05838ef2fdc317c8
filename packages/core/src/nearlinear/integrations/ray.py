"""Sharded models and their checkpoints in the worker function of a Ray Train run.

::

    from nearlinear.integrations.ray import prepare_model, report, resume

    def train(settings):
        model = prepare_model(build_model(), {"hybrid_shard_degree": 8})
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(resume(model, optimizer), settings["steps"]):
            for batch in nl.accumulate(model, micro_batches(step)):
                model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report({"step": step}, model, optimizer, step + 1)

    TorchTrainer(train, ...).fit()
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.fs
import ray.train  # pyright: ignore[reportMissingImports] - optional
from torch import nn
from torch.optim import Optimizer

from .. import storage
from ..checkpoint import resume as checkpoints
from ..checkpoint.save import save, step_folder
from ..distributed import runtime
from ..errors import ConfigError
from ..fsdp.deferred_init import broadcast_initial_values
from ..fsdp.shard import shard
from .host import Sharding, join


def prepare_model(model: nn.Module, sharding: Sharding = None) -> nn.Module:
    """Shard ``model`` over the workers, in place of ``ray.train.torch.prepare_model``.

    Args:
        model: Model to shard, in place. Rank 0's values are used on all workers.
        sharding: Config of `nearlinear.init`; default: shard over all workers.
    """
    join(sharding, "Ray Train")
    if not any(parameter.is_meta for parameter in model.parameters()):
        broadcast_initial_values(model, runtime.current())
    return shard(model)


def report(metrics: dict[str, Any], model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Report ``metrics`` with a sharded checkpoint, in place of ``ray.train.report``. Collective.

    The ranks write into the run's storage directly, which all nodes must reach.

    Args:
        metrics: As in ``ray.train.report``; numbers, no tensors.
        model: The model of `prepare_model`.
        optimizer: Its optimizer.
        step: Steps taken so far, which `resume` returns.
    """
    place = step_folder(_run_folder(), step)
    save(place, model, optimizer, step=step, wait=True)
    ray.train.report(
        metrics,
        checkpoint=ray.train.Checkpoint(str(place), pyarrow.fs.LocalFileSystem()),
        checkpoint_dir_name=place.name,
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )


def resume(model: nn.Module, optimizer: Optimizer) -> int:
    """Load the run's newest intact checkpoint, and return its step; 0 without one. Collective.

    The run may go on with another number of workers. Ray may not know the newest checkpoint yet:
    it learns of a report after the worker has gone on.
    """
    return checkpoints.resume(storage.as_path(_run_folder()), model, optimizer, {})


def _run_folder() -> Path:
    """Return the folder of the run."""
    place = ray.train.get_context().get_storage()
    if not isinstance(place.storage_filesystem, pyarrow.fs.LocalFileSystem):
        raise ConfigError(
            f"RunConfig(storage_path=...) is on {place.storage_filesystem.type_name}: allowed is "
            'a folder that all nodes mount. For a bucket, save with nl.save("s3://...") and call '
            "ray.train.report without a checkpoint"
        )
    return Path(place.experiment_fs_path)
