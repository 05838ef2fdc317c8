"""The pure-Python process group: what holds for the compiled one holds for it, training too."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.collectives import (
    runner,
    test_contract_calls,
    test_contract_coalescing,
    test_contract_groups,
    test_contract_lifecycle,
    test_contract_processes,
    test_contract_work,
    test_frameworks_parallelism,
    test_frameworks_replication,
    test_frameworks_sharding,
    test_mismatch,
    test_shared_output,
)
from tests.collectives.every_operation import every_operation
from tests.collectives.ranks import BACKEND, Pool

if BACKEND != "nearlinear":
    pytest.skip("is about nearlinear alone", allow_module_level=True)

CPU = torch.device("cpu")

# Every test of these once more, with this module's pool.
AGAIN = (
    test_contract_calls,
    test_contract_coalescing,
    test_contract_groups,
    test_contract_lifecycle,
    test_contract_processes,
    test_contract_work,
    test_frameworks_parallelism,
    test_frameworks_replication,
    test_frameworks_sharding,
    test_mismatch,
    test_shared_output,
)
for module in AGAIN:
    globals().update({name: it for name, it in vars(module).items() if name.startswith("test_")})
del globals()["test_a_script_under_torchrun"]  # brings its own processes
del globals()["test_the_debug_wrapper"]  # torch puts it around compiled backends only


@pytest.fixture(scope="module")
def pool():
    """Ranks that find no compiled glue."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NEARLINEAR_COLLECTIVES_GLUE", "python")
        pool = Pool()
    yield pool
    pool.close()


def look_at_group(rank):
    group, pair = dist.group.WORLD, dist.new_group([0, 1])
    names = [type(group).__name__, group.name(), dist.get_backend(), group.group_desc]
    return names, pair is not dist.GroupMember.NON_GROUP_MEMBER and pair.group_name


def test_torch_takes_the_group_as_it_is(pool):
    names = ["EngineProcessGroup", "nearlinear", "nearlinear", "default_pg"]
    (first, pair), (second, same), (third, none) = pool.run(look_at_group, ranks=3)
    assert first == second == third == names
    assert pair == same and pair != "" and none is False


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_operation_and_dtype_gives_the_truth(pool, ranks):
    for wrong, _ in pool.run(runner.run, every_operation(ranks), BACKEND, ranks=ranks):
        assert not wrong, "\n".join(wrong[:5])


def fill_the_pool(rank):
    """The same memory serves 40 tensors in turn, each of them kept by a view for a while."""
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


def test_memory_of_the_pool_is_given_back(pool):
    assert pool.run(fill_the_pool, ranks=1) == [(1, 0, True)]


def start_and_fail(rank):
    if rank == 1:
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


def test_a_call_under_way_ends_with_an_error_when_a_rank_dies(pool):
    case = pool.start(start_and_fail, ranks=3)
    try:
        case.collect(30, ranks=[0, 2])
        assert [case.outcomes[rank].value for rank in (0, 2)] == [True, True], case.stacks()
    finally:
        case.close()
