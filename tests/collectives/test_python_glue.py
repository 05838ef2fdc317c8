"""The pure-Python process group passes the tests of the compiled one, and trains."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.collectives import (
    runner,
    test_contract_calls,
    test_contract_coalescing,
    test_contract_groups,
    test_contract_work,
)
from tests.collectives.every_operation import every_operation
from tests.collectives.ranks import BACKEND, Pool

if BACKEND != "nearlinear":
    pytest.skip("is about nearlinear alone", allow_module_level=True)

CPU = torch.device("cpu")

# Repeat every contract test with this module's pool.
for module in (
    test_contract_calls,
    test_contract_coalescing,
    test_contract_groups,
    test_contract_work,
):
    globals().update({name: it for name, it in vars(module).items() if name.startswith("test_")})


@pytest.fixture(scope="module")
def pool():
    """Ranks without the compiled glue."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NEARLINEAR_COLLECTIVES_GLUE", "python")
        pool = Pool()
    yield pool
    pool.close()


def look_at_group(rank):
    group, pair = dist.group.WORLD, dist.new_group([0, 1])
    names = [type(group).__name__, group.name(), dist.get_backend(), group.group_desc]
    return names, pair is not dist.GroupMember.NON_GROUP_MEMBER and pair.group_name


def test_torch_uses_the_python_group_directly(pool):
    names = ["EngineProcessGroup", "nearlinear", "nearlinear", "default_pg"]
    (first, pair), (second, same), (third, none) = pool.run(look_at_group, ranks=3)
    assert first == second == third == names
    assert pair == same and pair != "" and none is False


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_operation_and_dtype_gives_exact_results(pool, ranks):
    for wrong, _ in pool.run(runner.run, every_operation(ranks), BACKEND, ranks=ranks):
        assert not wrong, "\n".join(wrong[:5])


def model() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 33), torch.nn.ReLU(), torch.nn.Linear(33, 31), torch.nn.Linear(31, 4)
    )


def train(net, rank) -> list[float]:
    """Return the losses of five steps, summed over all ranks."""
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-2), []
    source = torch.Generator().manual_seed(rank)
    for _ in range(5):
        batch = torch.randn(16, 8, generator=source)
        loss = (net(batch) - batch[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def train_sharded(rank, pooled=False, replicas=1):
    size = dist.get_world_size()
    mesh = init_device_mesh(
        "cpu", (replicas, size // replicas), mesh_dim_names=("replicate", "shard")
    )
    mesh, net = mesh if replicas > 1 else mesh["shard"], model()
    for layer in (*net, net):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    for layer in net.modules():
        if isinstance(layer, FSDPModule) and pooled:
            layer.set_allocate_memory_from_process_group_for_comm(True)
    return train(net, rank)


def train_replicated(rank):
    return train(DistributedDataParallel(model(), bucket_cap_mb=0.001), rank)


@pytest.mark.parametrize("ranks, options", [(2, ()), (2, (True,)), (4, (False, 2))])
def test_fsdp2_trains_as_on_gloo(pool, ranks, options):
    reference = pool.run(train_sharded, False, *options[1:], ranks=ranks, backend="gloo")
    found = pool.run(train_sharded, *options, ranks=ranks)
    assert found == [pytest.approx(losses, rel=1e-5) for losses in reference]


def test_ddp_trains_as_on_gloo(pool):
    reference = pool.run(train_replicated, ranks=2, backend="gloo")
    assert pool.run(train_replicated, ranks=2) == [pytest.approx(ls, rel=1e-5) for ls in reference]


def fill_the_pool(rank):
    """Allocate 40 tensors in turn, each kept alive by a view for a while; memory is reused."""
    backend, addresses = dist.group.WORLD._get_backend(CPU), set()
    for _ in range(40):
        tensor = backend.allocate_tensor(1 << 18, dtype=torch.float32, device=CPU)
        view = tensor[1:].view(-1)[:5]
        del tensor
        other = backend.allocate_tensor(1 << 18, dtype=torch.float32, device=CPU)
        assert abs(other.data_ptr() - view.data_ptr()) >= 1 << 20
        addresses.add(view.data_ptr())
        del view, other
    empty = backend.allocate_tensor(0, dtype=torch.float64, device=CPU)
    return len(addresses), empty.numel(), empty.dtype == torch.float64


def test_pool_memory_is_reused_after_free(pool):
    assert pool.run(fill_the_pool, ranks=1) == [(1, 0, True)]


def start_and_fail(rank):
    if rank == 1:
        import os
        import signal

        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    work = dist.all_reduce(torch.ones(4), async_op=True)
    future = work.get_future()
    with pytest.raises(dist.DistBackendError, match="rank 1 .* died"):
        work.wait()
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        future.wait()
    assert work.is_completed() and not work.is_success() and "rank 1" in str(work.exception())
    with pytest.raises(dist.DistBackendError, match="failed before"):
        dist.all_reduce(torch.ones(4))
    return True


def test_death_of_a_rank_fails_the_call_in_flight(pool):
    case = pool.start(start_and_fail, ranks=3)
    try:
        case.collect(30, ranks=[0, 2])
        assert [case.outcomes[rank].value for rank in (0, 2)] == [True, True], case.stacks()
    finally:
        case.close()


def use_after_the_end(rank):
    group = dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="has been destroyed"):
        group.allreduce([torch.ones(1)])
    group.abort()  # no effect after the end
    group.shutdown()


def test_destroyed_group_raises(pool):
    pool.run(use_after_the_end, ranks=2)
