"""Groups besides the default one: creation, independence, and sizes."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.collectives.ranks import BACKEND
from tests.collectives.runner import all_gather_single, reduce_scatter_single
from tests.collectives.worker import current_size as size_of_call
from tests.collectives.worker import join, store


def total(group=None, value: float = 1.0) -> float:
    tensor = torch.full((3,), value)
    dist.all_reduce(tensor, group=group)
    assert len(set(tensor.tolist())) == 1
    return tensor[0].item()


def use_subgroups(rank):
    pairs = list(itertools.combinations(range(dist.get_world_size()), 2))
    groups = [dist.new_group(list(pair)) for pair in pairs]
    found = {}
    for pair, group in zip(pairs, groups, strict=True):
        if rank in pair:
            assert dist.get_backend(group) == BACKEND
            assert tuple(dist.get_process_group_ranks(group)) == pair
            found[pair] = total(group, 10.0**rank)
        else:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
    everyone = total()
    for pair, group in zip(pairs, groups, strict=True):
        if rank in pair:
            dist.destroy_process_group(group)
    return found, everyone, total()


def test_sub_groups_have_members_and_ranks(pool):
    for rank, (found, before, after) in enumerate(pool.run(use_subgroups, ranks=5)):
        assert found == {pair: 10.0 ** pair[0] + 10.0 ** pair[1] for pair in found}
        assert len(found) == 4 and all(rank in pair for pair in found)
        assert before == after == 5


def members_only(rank):
    if rank == 2:
        return None  # creates no group, and no other rank waits for this call
    group = dist.new_group([0, 1, 3], use_local_synchronization=True)
    return total(group)


def test_group_can_be_created_by_its_members_only(pool):
    assert pool.run(members_only, ranks=4) == [3, 3, None, 3]


def out_of_order_members(rank):
    group = dist.new_group([3, 1, 0], use_local_synchronization=False)
    if rank == 2:
        return None
    mine, output = torch.tensor([float(rank)]), torch.empty(3)
    all_gather_single(output, mine, group=group)
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, src=3, group=group)
    second = torch.tensor([float(rank)])
    dist.broadcast(second, group_src=1, group=group)
    by_rank = [dist.get_global_rank(group, i) for i in range(3)]
    return output.tolist() == by_rank, tensor.item(), second.item() == by_rank[1]


def test_group_ranks_map_to_global_ranks(pool):
    assert pool.run(out_of_order_members, ranks=4) == [(True, 3.0, True)] * 2 + [
        None,
        (True, 3.0, True),
    ]


def many_groups(rank):
    groups = [dist.new_group() for _ in range(60)]
    totals = [total(group, number) for number, group in enumerate(groups)]
    works = [dist.all_reduce(torch.ones(100), group=group, async_op=True) for group in groups]
    for work in reversed(works):
        work.wait()
        assert work.result()[0].sum() == 100 * dist.get_world_size()
    return totals


def test_many_groups_coexist(pool):
    expected = [3.0 * number for number in range(60)]
    assert pool.run(many_groups, ranks=3) == [expected] * 3


def opposite_orders(rank):
    """Rank 0 calls on A, then B; rank 1 on B, then A. c10d does not order calls of two groups."""
    groups = [dist.new_group(), dist.new_group()]
    for count in (3, 200_000):
        for _ in range(20):
            tensors = [torch.full((count,), 1.0), torch.full((count,), 2.0)]
            order = (0, 1) if rank == 0 else (1, 0)
            works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
            for work in works:
                work.wait()
            assert (tensors[0] == 2).all() and (tensors[1] == 4).all()
    return True


def test_groups_do_not_wait_for_each_other(pool):
    assert pool.run(opposite_orders, ranks=2, limit=30) == [True, True]


def blocked_group_blocks_no_other(rank):
    """Rank 1 joins the call on A only after rank 0 has completed one on B."""
    a, b = dist.new_group(), dist.new_group()
    late = torch.ones(1)
    if rank == 0:
        work = dist.all_reduce(late, group=a, async_op=True)
    with_async, with_sync = torch.ones(70_000), torch.ones(70_000)
    dist.all_reduce(with_async, group=b, async_op=True).wait()
    dist.all_reduce(with_sync, group=b)
    if rank == 1:
        work = dist.all_reduce(late, group=a, async_op=True)
    work.wait()
    return late.item(), with_async[-1].item(), with_sync[-1].item()


def test_waiting_call_blocks_only_its_own_group(pool):
    assert pool.run(blocked_group_blocks_no_other, ranks=2, limit=30) == [(2, 2, 2)] * 2


def meshes(rank):
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard"))
    sums = [total(mesh.get_group(axis), 10.0**rank) for axis in ("replicate", "shard")]
    flat = mesh["replicate", "shard"]._flatten("all")
    own, _ = dist.new_subgroups(3)
    halves, _ = dist.new_subgroups_by_enumeration([[0, 5], [1, 4], [2, 3]])
    return [*sums, total(flat.get_group()), total(own), total(halves, float(rank))]


def test_device_meshes_and_helpers_create_groups(pool):
    for rank, found in enumerate(pool.run(meshes, ranks=6)):
        row, column = rank // 3 * 3, rank % 3
        replicate = 10.0**column + 10.0 ** (column + 3)
        shard = sum(10.0 ** (row + i) for i in range(3))
        assert found == [replicate, shard, 6, 3, 5]


def splitting(rank):
    with pytest.raises(RuntimeError):
        dist.split_group(split_ranks=[[0], [1]])
    return total()


def test_split_group_is_rejected_like_gloo(pool):
    assert pool.run(splitting, ranks=2) == [2, 2]


def alone(rank):
    tensor = torch.arange(5.0)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        dist.all_reduce(tensor, op)
    dist.broadcast(tensor, 0)
    dist.barrier()
    gathered, scattered, listed = torch.empty(5), torch.empty(5), [torch.empty(5)]
    all_gather_single(gathered, tensor)
    reduce_scatter_single(scattered, tensor)
    dist.all_gather(listed, tensor)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    for other in (gathered, scattered, *listed):
        assert torch.equal(other, tensor)
    exchanged = torch.empty(5)
    dist.all_to_all_single(exchanged, tensor)
    assert torch.equal(exchanged, tensor)
    return tensor.tolist()


def test_group_of_one_rank_works(pool):
    assert pool.run(alone, ranks=1) == [[0.0, 1.0, 2.0, 3.0, 4.0]]


def named_for_a_device(rank):
    join(f"cpu:{BACKEND}")
    group = dist.new_group([0, 1])
    objects = [None] * size_of_call()
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    mesh = init_device_mesh("cpu", (3,))
    return total(), total(group) if rank < 2 else 2, objects, total(mesh.get_group())


def test_backend_can_be_named_for_cpu(pool):
    objects = [{"rank": rank} for rank in range(3)]
    assert pool.run(named_for_a_device, ranks=3, backend=None) == [(3, 2, objects, 3)] * 3


def beside_gloo(rank):
    gloo = dist.new_group(backend="gloo")
    ours = dist.new_group(backend=BACKEND)
    return [total(gloo), total(ours), total()]


@pytest.mark.parametrize("default", ["gloo", BACKEND])
def test_nearlinear_and_gloo_groups_coexist(pool, default):
    assert pool.run(beside_gloo, ranks=2, backend=default) == [[2, 2, 2]] * 2


def rank_zero_keeps_the_store(rank):
    """Rendezvous of a plain script: rank 0 hosts the store, not a launcher."""
    gate = store("port")
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        gate.set("port", str(server.port))
    else:
        server = dist.TCPStore("127.0.0.1", int(gate.get("port")), is_master=False)
    dist.init_process_group(BACKEND, store=server, rank=rank, world_size=size_of_call())
    return total()


def test_store_can_be_hosted_by_rank_zero(pool):
    assert pool.run(rank_zero_keeps_the_store, ranks=3, backend=None) == [3, 3, 3]


def file_store(rank, path):
    # A FileStore lacks the multi-key calls of a TCPStore.
    group_store = dist.FileStore(path, size_of_call())
    dist.init_process_group(BACKEND, store=group_store, rank=rank, world_size=size_of_call())
    return total()


def test_any_store_is_supported(pool, tmp_path):
    assert pool.run(file_store, str(tmp_path / "store"), ranks=3, backend=None) == [3, 3, 3]
