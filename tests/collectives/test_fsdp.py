"""FSDP2 with the package's AllGather and ReduceScatter trains as on gloo, on any group."""

import inspect
import unittest.mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import nearlinear_collectives
from nearlinear_collectives import fsdp
from tests.collectives.ranks import BACKEND

if BACKEND != "nearlinear":
    pytest.skip("is about nearlinear alone", allow_module_level=True)


@pytest.mark.parametrize("name", ["AllGather", "ReduceScatter"])
def test_signatures_match_torch(name):
    """Check the private classes of torch that the package subclasses."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_collectives
    except ImportError as error:
        pytest.fail(f"torch {torch.__version__} moved FSDP2's interface: mend fsdp.py ({error})")
    ours = getattr(nearlinear_collectives, name)
    assert issubclass(ours, getattr(_fsdp_api, name))
    assert not ours.__abstractmethods__, f"torch {torch.__version__} asks for more: mend fsdp.py"
    theirs = getattr(_fsdp_collectives, f"Default{name}")
    for method in ("allocate", "__call__"):
        wanted = inspect.signature(getattr(theirs, method)).parameters
        declared = inspect.signature(getattr(ours, method)).parameters
        assert list(declared) == list(wanted), (
            f"torch {torch.__version__} changed {name}.{method}(): mend fsdp.py"
        )


def model() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(96, 700),
        torch.nn.ReLU(),
        torch.nn.Linear(700, 301),
        torch.nn.Linear(301, 8),
    )


def train(rank, how: str, dtype: torch.dtype) -> tuple[list[float], int]:
    """Return (losses of five steps, calls of the package's collectives)."""
    calls = []

    def counted(kind):
        class Counted(kind):
            def __call__(self, *args, **kwargs):
                calls.append(kind)
                return super().__call__(*args, **kwargs)

        return Counted

    group = dist.group.WORLD
    mesh = DeviceMesh.from_group(dist.new_group(backend="gloo") if how == "aside" else group, "cpu")
    net, policy = model(), MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in (*net, net):
        if isinstance(layer, torch.nn.Linear) or layer is net:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    if how != "torch":
        kinds = (nearlinear_collectives.AllGather, nearlinear_collectives.ReduceScatter)
        with unittest.mock.patch.multiple(
            fsdp, AllGather=counted(kinds[0]), ReduceScatter=counted(kinds[1])
        ):
            nearlinear_collectives.use_in(net, group)
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-4), []
    source = torch.Generator().manual_seed(rank)
    for _ in range(5):
        batch = torch.randn(16, 96, generator=source)
        loss = (net(batch) - batch[:, :8]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(total.item())
    return losses, len(calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("how", ["ours", "aside"])
def test_fsdp2_trains_with_package_collectives(pool, how, ranks, dtype):
    reference = pool.run(train, "torch", dtype, ranks=ranks, backend="gloo")
    found = pool.run(train, how, dtype, ranks=ranks)
    for (losses, count), (wanted, none) in zip(found, reference, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert none == 0 and count == 5 * 3 * 3  # steps, layers, two gathers and a reduction


def look_at_memory(rank):
    found, cpu = [], torch.device("cpu")
    for kind in (nearlinear_collectives.AllGather, nearlinear_collectives.ReduceScatter):
        for size in ((6, 10), (2, 3, 50_000)):
            tensor = kind(dist.group.WORLD).allocate(size, dtype=torch.bfloat16, device=cpu)
            found.append((tuple(tensor.shape), tensor.dtype, mapping_of(tensor.data_ptr())))
    return found


def mapping_of(address: int) -> str:
    """Return the kernel's name of the mapping at an address."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= address < end:
                return line.partition("/")[2].strip()
    return ""


def test_gathered_memory_is_shared_by_the_node(pool):
    for found in pool.run(look_at_memory, ranks=2):
        assert [(shape, dtype) for shape, dtype, _ in found] == [
            ((6, 10), torch.bfloat16),
            ((2, 3, 50_000), torch.bfloat16),
        ] * 2
        assert all("memfd:nearlinear" in mapping for *_, mapping in found), found


def gather_over_other_ranks(rank):
    pair = dist.new_group([0, 1])
    net = fully_shard(torch.nn.Linear(4, 4), mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
    if rank < 2:
        nearlinear_collectives.use_in(net, pair)
        with pytest.raises(ValueError, match=r"group of ranks \[0, 1\], but .* over \[0, 1, 2\]"):
            net(torch.ones(4))
    return True


def test_use_in_rejects_a_model_without_fsdp2():
    with pytest.raises(ValueError, match="call fully_shard"):
        nearlinear_collectives.use_in(torch.nn.Linear(2, 2), group=None)


def test_use_in_rejects_a_group_of_other_ranks(pool):
    assert pool.run(gather_over_other_ranks, ranks=3) == [True] * 3
