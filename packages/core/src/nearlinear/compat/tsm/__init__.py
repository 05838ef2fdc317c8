"""SMP v2's package ``torch.sagemaker``, on nearlinear's own parallelism.

The modules have the names of the public API, so that ``torch.sagemaker.X`` is ``tsm.X``::

    from nearlinear.compat import tsm

    tsm.init({"hybrid_shard_degree": 8})
    model = tsm.transform(model)
    model = FullyShardedDataParallel(model, mixed_precision=MixedPrecision(torch.bfloat16))

`init` lets torch's ``FullyShardedDataParallel`` construct a `fsdp1.ShardedModel`, until `shutdown`.
"""

from . import delayed_param, distributed, fsdp1, job, moe, nn, transformer_engine, utils
from .job import init, is_initialized, shutdown, state, transform

__all__ = [
    "delayed_param",
    "distributed",
    "fsdp1",
    "init",
    "is_initialized",
    "job",
    "moe",
    "nn",
    "shutdown",
    "state",
    "transform",
    "transformer_engine",
    "utils",
]
