"""Tensor, sequence and pipeline parallelism train as on gloo."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.collectives import training
from tests.collectives.training import Block, make_model, same_as_gloo, summary

both = pytest.mark.parametrize("ranks", [2, 4])


def parallelize(model, mesh, sequence_parallel: bool) -> None:
    """Shard columns of the first and rows of the second layer; activations full or by rows."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence_parallel:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    if sequence_parallel:
        whole = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
        gathered = PrepareModuleInput(
            input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
        )
        parallelize_module(model, mesh, {"first": whole, "head": gathered})


def tensor_parallel(rank, sequence_parallel, sharded):
    size = dist.get_world_size()
    shape = (2, size // 2) if sharded else (1, size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    model = make_model()
    parallelize(model, mesh["tensor"], sequence_parallel)
    if sharded:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = training.train(model, optimizer, mesh["data"].get_local_rank())
    return losses + summary(model)


@both
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_trains_as_on_gloo(pool, sequence_parallel, ranks):
    same_as_gloo(pool, tensor_parallel, sequence_parallel, False, ranks=ranks)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_with_fsdp2_trains_as_on_gloo(pool, sequence_parallel):
    same_as_gloo(pool, tensor_parallel, sequence_parallel, True, ranks=4)


def redistribute(rank):
    """Redistribute between all pairs of placements, on a tensor of uneven shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(7 * 10.0).view(7, 10)
    sums = []
    for source in (Shard(0), Shard(1), Replicate()):
        for target in (Shard(0), Shard(1), Replicate()):
            moved = distribute_tensor(whole, mesh, [source]).redistribute(mesh, [target])
            assert torch.equal(moved.full_tensor(), whole), (source, target)
            sums.append(moved.to_local().sum().item())
    return sums


@pytest.mark.parametrize("ranks", [2, 3])
def test_dtensor_redistribution_as_on_gloo(pool, ranks):
    same_as_gloo(pool, redistribute, ranks=ranks, tolerance=0.0)


class Stage(nn.Module):
    """A pipeline stage of some blocks; the last stage has the head."""

    def __init__(self, model, number: int, of: int):
        super().__init__()
        self.first = model.first if number == 0 else None
        self.blocks = nn.ModuleList(model.blocks[number::of])
        self.head = model.head if number == of - 1 else None

    def forward(self, x):
        x = x if self.first is None else self.first(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x).squeeze(-1)


def pipeline(rank, schedule_name):
    size = dist.get_world_size()
    schedules = {
        "GPipe": ScheduleGPipe,
        "1F1B": Schedule1F1B,
        "Interleaved1F1B": ScheduleInterleaved1F1B,
    }
    interleaved = schedule_name == "Interleaved1F1B"
    count = 2 * size if interleaved else size
    model = make_model(blocks=count)
    mine = range(rank, count, size)
    modules = [Stage(model, number, count) for number in mine]
    stages = [
        PipelineStage(module, number, count, torch.device("cpu"))
        for module, number in zip(modules, mine, strict=True)
    ]
    schedule = schedules[schedule_name](
        stages if interleaved else stages[0], n_microbatches=2 * size, loss_fn=training.loss_of
    )
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    losses = []
    for step in range(training.STEPS):
        x = torch.cat([training.batch(step, part) for part in range(size)])
        found = []
        last = {"target": x, "losses": found} if rank == size - 1 else {}
        schedule.step(*([x] if rank == 0 else []), **last)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(found).mean() if found else torch.zeros(())
        dist.broadcast(mean, size - 1)
        losses.append(mean.item())
    return losses + summary(nn.ModuleList(modules))


@both
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_pipeline_trains_as_on_gloo(pool, schedule, ranks):
    same_as_gloo(pool, pipeline, schedule, ranks=ranks)


def compiled(rank):
    """Run functional collectives in a compiled function, forward and backward."""
    import torch.distributed._functional_collectives as funcol

    model, group = Block(), dist.group.WORLD
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x):
        gathered = funcol.all_gather_tensor(model(x), 0, group)
        return funcol.all_reduce(gathered * (rank + 1), "sum", group).square().mean()

    losses = []
    for number in range(training.STEPS):
        losses.append(step(training.batch(number, rank)).item())
    return losses


@pytest.mark.slow
def test_collectives_work_in_compiled_functions(pool):
    same_as_gloo(pool, compiled, ranks=2, limit=120)
