"""FSDP2 with `nearlinear_collectives.AllGather`: gloo's losses, also where it gathers aside."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tests.collectives.ranks import BACKEND

if BACKEND != "nearlinear":
    pytest.skip("is about nearlinear alone", allow_module_level=True)


def test_torch_calls_an_all_gather_as_ours_is_declared():
    """The one private class of torch that the package stands on."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_collectives
    except ImportError as error:
        pytest.fail(f"torch {torch.__version__} moved FSDP2's interface: mend fsdp.py ({error})")
    from nearlinear_collectives import AllGather

    assert issubclass(AllGather, _fsdp_api.AllGather)
    assert not AllGather.__abstractmethods__, (
        f"torch {torch.__version__} asks for more: mend fsdp.py"
    )
    theirs = _fsdp_collectives.DefaultAllGather
    for name in ("allocate", "__call__"):
        wanted = inspect.signature(getattr(theirs, name)).parameters
        ours = inspect.signature(getattr(AllGather, name)).parameters
        assert list(ours) == list(wanted), (
            f"torch {torch.__version__} changed {name}(): mend fsdp.py"
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
    """(losses of five steps, calls of our all-gather) on FSDP2's own gathers or ours."""
    from nearlinear_collectives import AllGather

    calls = []

    class Counted(AllGather):
        def __call__(self, *args, **kwargs):
            calls.append(kwargs)
            return super().__call__(*args, **kwargs)

    group = dist.group.WORLD
    mesh = DeviceMesh.from_group(dist.new_group(backend="gloo") if how == "aside" else group, "cpu")
    net, policy = model(), MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in (*net, net):
        if isinstance(layer, torch.nn.Linear) or layer is net:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    for module in net.modules():
        if isinstance(module, FSDPModule) and how != "torch":
            module.set_custom_all_gather(Counted(group))
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
def test_fsdp2_trains_with_our_all_gather(pool, how, ranks, dtype):
    reference = pool.run(train, "torch", dtype, ranks=ranks, backend="gloo")
    found = pool.run(train, how, dtype, ranks=ranks)
    for (losses, count), (wanted, none) in zip(found, reference, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert none == 0 and count == 5 * 3 * 2  # steps, layers, forward and backward


def look_at_memory(rank):
    from nearlinear_collectives import AllGather

    found, cpu = [], torch.device("cpu")
    for size in ((6, 10), (2, 3, 50_000)):
        tensor = AllGather(dist.group.WORLD).allocate(size, dtype=torch.bfloat16, device=cpu)
        found.append((tuple(tensor.shape), tensor.dtype, mapping_of(tensor.data_ptr())))
    return found


def mapping_of(address: int) -> str:
    """The name of the memory there, as the kernel has it."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= address < end:
                return line.partition("/")[2].strip()
    return ""


def test_its_memory_is_shared_with_the_node(pool):
    for found in pool.run(look_at_memory, ranks=2):
        assert [(shape, dtype) for shape, dtype, _ in found] == [
            ((6, 10), torch.bfloat16),
            ((2, 3, 50_000), torch.bfloat16),
        ]
        assert all("memfd:nearlinear" in mapping for *_, mapping in found), found


def gather_over_other_ranks(rank):
    from nearlinear_collectives import AllGather

    pair = dist.new_group([0, 1])
    net = fully_shard(torch.nn.Linear(4, 4), mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
    if rank < 2:
        net.set_custom_all_gather(AllGather(pair))
        with pytest.raises(ValueError, match=r"group of ranks \[0, 1\], but .* over \[0, 1, 2\]"):
            net(torch.ones(4))
    return True


def test_a_group_of_other_ranks_is_refused(pool):
    assert pool.run(gather_over_other_ranks, ranks=3) == [True] * 3
