"""Global gradient norms over sharded, replicated and plain gradients, against torch's own."""

import math

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import nearlinear as nl
from nearlinear.distributed.runtime import current_mesh
from tests.support import families, tiny


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("max_norm", [0.05, 1e9])
def test_clip_grad_norm_equals_torch(degree, max_norm):
    ids = tiny.rows(0, 8)
    torch.manual_seed(0)
    model = tiny.gpt2(2)
    model(**tiny.batch(ids)).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
    gradients = {name: p.grad for name, p in model.named_parameters()}

    def clip(rank):
        mesh = nl.init({"hybrid_shard_degree": degree})
        with nl.spmd.one_at_a_time(seed=0):
            model = tiny.gpt2(2)
        nl.shard(model)
        mine = ids.chunk(4)[mesh.data_rank(rank)]
        model(**tiny.batch(mine)).loss.backward()
        norm = nl.clip_grad_norm_(model, max_norm)
        return norm, {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    for norm, found in nl.spmd.run(clip, 4):
        assert norm == pytest.approx(expected, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-4)


def test_norm_covers_gradients_on_different_meshes():
    """Two meshes and a plain tensor in one norm, which torch's clip_grad_norm_ refuses."""

    def clip(rank):
        nl.init({"hybrid_shard_degree": 2})
        mesh = current_mesh().device_mesh("cpu")
        values = [torch.full((4, 4), 3.0), torch.full((4,), 2.0), torch.full((2,), 1.0)]
        parameters = []
        for value, where, places in [
            (values[0], mesh, (Replicate(), Shard(0))),
            (values[1], mesh["shard"], (Shard(0),)),
            (values[2], None, None),
        ]:
            parameter = torch.nn.Parameter(value.clone())
            if where is not None:
                parameter = torch.nn.Parameter(distribute_tensor(value, where, places))
                parameter.grad = distribute_tensor(value.clone(), where, places)
            else:
                parameter.grad = value.clone()
            parameters.append(parameter)
        norm = nl.clip_grad_norm_(parameters, 1.0)
        whole = [
            p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters
        ]
        return norm, math.sqrt(sum(g.square().sum().item() for g in whole))

    expected = math.sqrt(16 * 9 + 4 * 4 + 2)
    for norm, after in nl.spmd.run(clip, 4):
        assert norm == pytest.approx(expected)
        assert after == pytest.approx(1.0, rel=1e-5)


def test_parameters_of_split_layers_have_the_norm_of_one_process():
    """The axes of a norm come from the parameters when no module is given."""
    ids = torch.arange(32).reshape(2, 16)
    torch.manual_seed(0)
    model = families.build("gpt2")
    model(ids, labels=ids).loss.backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()

    def clip(rank):
        nl.init({"tensor_parallel_degree": 2})
        with nl.spmd.one_at_a_time(seed=0):
            model = families.build("gpt2")
        split = nl.shard(nl.transform(model))
        split(ids, labels=ids).loss.backward()
        return nl.clip_grad_norm_(split.parameters(), math.inf)

    assert nl.spmd.run(clip, 2) == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_norms_of_any_size_are_clipped_as_by_torch(size):
    """The term that torch adds to the norm counts for tiny gradients."""
    ours, others = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    ours.grad, others.grad = (torch.full((4,), size) for _ in range(2))
    nl.clip_grad_norm_([ours], size)
    torch.nn.utils.clip_grad_norm_([others], size)
    torch.testing.assert_close(ours.grad, others.grad, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_norm_leaves_gradients_unchanged(bad):
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.tensor([1.0, bad, 2.0])
    before = parameter.grad.clone()
    assert not math.isfinite(nl.clip_grad_norm_([parameter], 1.0))
    torch.testing.assert_close(parameter.grad, before, equal_nan=True)


def test_norm_without_gradients_is_zero():
    assert nl.clip_grad_norm_([torch.nn.Parameter(torch.ones(3))], 1.0) == 0.0


@pytest.mark.parametrize("slices", [False, True])
def test_optimizer_step_clips_to_sdp_gradient_clipping(slices):
    ids = tiny.rows(0, 8)
    torch.manual_seed(0)
    model = tiny.gpt2(2)
    model(**tiny.batch(ids)).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()
    assert norm > 0.1  # or nothing is clipped
    torch.optim.SGD(model.parameters(), lr=1.0).step()

    def step(rank):
        config = {"hybrid_shard_degree": 2, "shard_optimizer_state": slices}
        mesh = nl.init(config | {"sdp_gradient_clipping": 0.05})
        with nl.spmd.one_at_a_time(seed=0):
            sharded = tiny.gpt2(2)
        nl.shard(sharded)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
        optimizer = nl.shard_optimizer(optimizer, sharded)
        own = tiny.batch(ids.chunk(4)[mesh.data_rank(rank)])
        for batch in nl.accumulate(sharded, [own]):
            sharded(**batch).loss.backward()
        optimizer.step()
        return {name: p.full_tensor().detach() for name, p in sharded.named_parameters()}

    for found in nl.spmd.run(step, 4):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), atol=2e-6, rtol=1e-4)
