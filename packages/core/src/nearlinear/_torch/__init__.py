"""The only package that imports private names of torch, each with the versions it was checked on.

Everything else in nearlinear uses torch's documented API. When a torch release moves a name, an
import here fails, tests/core/test_torch_shim.py names it, and only its module here changes. On the
CPU torch 2.8 is the oldest supported release: FSDP2 of 2.6 does not run there, and FSDP2 of 2.7
not with replicas.
"""

from torch.multiprocessing.reductions import StorageWeakRef as WeakStorage  # 2.8.0, 2.13.0
from torch.utils._python_dispatch import TorchDispatchMode  # sees every operator; 2.8.0, 2.13.0

from .attention import flash_attention, flash_attention_backward, has_flash_attention
from .fake import fake_tensors, forget_layouts, is_fake, unset_fake, watching_resizes
from .groups import job_store, name_of_group, thread_group_base
from .tensors import instead_of_truncated_normal, local_block, storage_of
from .training import (
    abandon_backward,
    after_backward,
    communication_classes,
    enable_async_all_gather,
    gathered_bytes,
    in_backward,
    map_instances,
    map_tensors,
    recomputing,
    reduce_unused_parameters,
    seeing_saved_tensors,
    sharded_parameters,
    shards_on_cpu,
    supports_custom_collectives,
    tensors_in,
)

__all__ = [
    "TorchDispatchMode",
    "WeakStorage",
    "abandon_backward",
    "after_backward",
    "communication_classes",
    "enable_async_all_gather",
    "fake_tensors",
    "flash_attention",
    "flash_attention_backward",
    "forget_layouts",
    "gathered_bytes",
    "has_flash_attention",
    "in_backward",
    "instead_of_truncated_normal",
    "is_fake",
    "job_store",
    "local_block",
    "map_instances",
    "map_tensors",
    "name_of_group",
    "recomputing",
    "reduce_unused_parameters",
    "seeing_saved_tensors",
    "sharded_parameters",
    "shards_on_cpu",
    "storage_of",
    "supports_custom_collectives",
    "tensors_in",
    "thread_group_base",
    "unset_fake",
    "watching_resizes",
]
