"""PyTorch's own: FSDP1, FSDP2 sharded over all ranks, and hybrid as its documentation shows it."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .. import model
from ..plan import Plan


class Fsdp:
    """Gradients of the micro-batches add up in ``.grad``, reduced after each, as is the default."""

    def __init__(self, plan: Plan, kind: str, backend: str = "gloo"):
        self.model = model.build(plan)
        getattr(self, f"_shard_{kind}")(plan)
        if backend == "nearlinear":
            self._use_nearlinear()
        self.optimizer = model.optimizer(self.model.parameters(), plan)

    def _shard_compute(self, plan: Plan) -> None:
        """No sharding, no communication: every rank trains alone, and its losses go astray."""

    def _shard_full(self, plan: Plan) -> None:
        self._fully_shard(init_device_mesh("cpu", (plan.world,)))

    def _shard_hybrid(self, plan: Plan) -> None:
        shape = (plan.world // plan.shard, plan.shard)
        self._fully_shard(init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))

    def _fully_shard(self, mesh) -> None:
        self.mesh = mesh
        for block in model.blocks(self.model):
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def _shard_fsdp1(self, plan: Plan) -> None:
        import torch
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        wrap = ModuleWrapPolicy({type(model.blocks(self.model)[0])})
        self.model = FullyShardedDataParallel(
            self.model,
            auto_wrap_policy=wrap,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )

    def _use_nearlinear(self) -> None:
        import nearlinear_collectives

        ranks = dist.get_process_group_ranks(self.mesh.get_group(self.mesh.ndim - 1))
        group = dist.new_group(ranks, backend="nearlinear", use_local_synchronization=True)
        nearlinear_collectives.use_in(self.model, group)

    def step(self, batches) -> float:
        total = 0.0
        for batch in batches:
            loss = self.model(**batch).loss
            (loss / len(batches)).backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total / len(batches)


def build(plan: Plan, **options) -> Fsdp:
    return Fsdp(plan, **options)
