"""DDP with communication hooks and joins, and the ZeRO optimizer train as on gloo."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.collectives import training
from tests.collectives.training import make_model, same_as_gloo, summary

both = pytest.mark.parametrize("ranks", [2, 4])


class Detour(training.Model):
    """Skip a block on odd ranks, so that its gradients are missing there."""

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number == 1 and dist.get_rank() % 2:
                continue
            x = block(x)
        return self.head(x).squeeze(-1)


def mean_hook(group, bucket):
    """Communication hook whose future holds a list with the bucket."""
    buffer = bucket.buffer().div_(dist.get_world_size(group))
    future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def gathering_hook(group, bucket):
    """Communication hook with an all-gather instead of an all-reduce."""
    size, buffer = dist.get_world_size(group), bucket.buffer()
    parts = [torch.empty_like(buffer) for _ in range(size)]
    future = dist.all_gather(parts, buffer, group=group, async_op=True).get_future()
    return future.then(lambda done: torch.stack(parts).mean(0))


def ddp(rank, feature):
    torch.manual_seed(0)
    model = Detour() if feature == "unused" else make_model()
    options = {
        "unused": {"find_unused_parameters": True},
        "buckets": {"bucket_cap_mb": 0.01},
        "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.02},
        "static": {"static_graph": True},
    }
    model = DistributedDataParallel(model, **options.get(feature, {}))
    if feature == "hook":
        model.register_comm_hook(dist.group.WORLD, mean_hook)
    elif feature == "gathering hook":
        model.register_comm_hook(dist.group.WORLD, gathering_hook)
    elif feature == "fp16 hook":
        model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    elif feature == "powerSGD":
        state = powerSGD_hook.PowerSGDState(
            dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2, random_seed=1
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return training.train(model, optimizer, rank) + summary(model)


FEATURES = ("", "buckets", "views", "unused", "static", "hook", "gathering hook", "fp16 hook")


@both
@pytest.mark.parametrize("feature", [*FEATURES, "powerSGD"])
def test_ddp_trains_as_on_gloo(pool, feature, ranks):
    # PowerSGD orthogonalizes its factors, which magnifies the last bits of a sum of four.
    tolerance = {"fp16 hook": 1e-2, "powerSGD": 1e-3}.get(feature, 1e-5)
    same_as_gloo(pool, ddp, feature, ranks=ranks, tolerance=tolerance)


def uneven(rank):
    """Rank r has r more batches; finished ranks shadow the collectives of the others."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with Join([model]):
        for step in range(training.STEPS + rank):
            x = training.batch(step, rank)
            loss = training.loss_of(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses + summary(model)


@both
def test_ddp_join_with_uneven_inputs(pool, ranks):
    same_as_gloo(pool, uneven, ranks=ranks)


def zero_optimizer(rank, views):
    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=views,
        lr=1e-2,
    )
    losses = training.train(model, optimizer, rank)
    optimizer.consolidate_state_dict(0)
    states = len(optimizer.state_dict()["state"]) if rank == 0 else 0
    return [*losses, *summary(model), states]


@both
@pytest.mark.parametrize("views", [False, True])
def test_zero_redundancy_optimizer_trains_as_on_gloo(pool, views, ranks):
    same_as_gloo(pool, zero_optimizer, views, ranks=ranks)


def sync_batch_norm_by_hand(rank):
    """Compute statistics over all ranks with differentiable functional collectives."""
    import torch.distributed.nn.functional as collectives

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(training.STEPS):
        x = training.batch(step, rank)
        hidden = model.blocks[0](model.first(x))
        mean = collectives.all_reduce(hidden.mean(0)) / dist.get_world_size()
        together = torch.cat(collectives.all_gather(model.head(hidden - mean).squeeze(-1)))
        loss = together.square().mean()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses + summary(model)


@both
def test_differentiable_collectives_as_on_gloo(pool, ranks):
    same_as_gloo(pool, sync_batch_norm_by_hand, ranks=ranks)
