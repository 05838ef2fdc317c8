"""DeepSpeed's MiCS, as its last release had it (0.19.6; removed in 0.19.7), made to run here.

Two things in it are mended, without which it cannot take part: its gathers ask gloo for coalescing,
which gloo has not; and parameters keep the whole world as their group, so that with more than one
replica most ranks drop their gradients and the job hangs.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from ..plan import Plan
from .zero import Zero3


class DeepSpeedMics(Zero3):
    def prepare(self, built, config: dict, plan: Plan) -> None:
        import deepspeed
        from deepspeed.comm.torch import TorchBackend

        config["zero_optimization"] |= {
            "mics_shard_size": plan.shard,
            "mics_hierarchical_params_gather": 1 < plan.ranks_per_node < plan.shard,
        }
        os.environ["NDEV_PER_NODE"] = str(plan.ranks_per_node)
        TorchBackend.all_gather_coalesced = _one_by_one
        deepspeed.zero.MiCS_Init(module=built, config_dict_or_path=config)
        for parameter in built.parameters():
            group = parameter.comm.param_shard_group
            parameter.ds_process_group = group
            parameter.ds_zero_partition_rank = dist.get_rank(group)
            parameter.ds_zero_partition_world_size = dist.get_world_size(group)


class _AllOf:
    """The handle of several gathers."""

    def __init__(self, handles):
        self.handles = handles

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()


def _one_by_one(self, output_tensors, input_tensors, group=None, async_op=False):
    """All-gather each of ``input_tensors`` (E,) into its output (ranks * E,), all under way."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    handles = _AllOf(
        [dist.all_gather_into_tensor(*pair, group=group, async_op=True) for pair in pairs]
    )
    if async_op:
        return handles
    handles.wait()
    return None


def build(plan: Plan) -> DeepSpeedMics:
    return DeepSpeedMics(plan)
