"""What one layout of parallelism saved, any other goes on with: fused and tied weights too."""

import json

import pytest
import torch

import nearlinear as nl
from nearlinear.spmd.failures import RankError
from tests.support import parity

ALONE = (1, {})
SHARDED = (4, {"hybrid_shard_degree": 4})
TENSOR = (4, {"tensor_parallel_degree": 4})
BOTH = (8, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2})
REPLICATED = (4, {"hybrid_shard_degree": 2})
SLICED = (4, {"hybrid_shard_degree": 2, "shard_optimizer_state": True})
OTHERWISE = (4, {"hybrid_shard_degree": 1, "shard_optimizer_state": True})
IN_TENSORS = (4, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1}
              | {"shard_optimizer_state": True, "overlap_communication": False})  # fmt: skip


def started(rank, family, config):
    mesh = nl.init(config)
    with nl.delayed_init():
        model = parity.unseeded(family)
    model = nl.shard(nl.transform(model))
    return mesh, model, nl.shard_optimizer(parity.adamw(model, 1e-3), model)


def steps(mesh, rank, model, updates, numbers) -> None:
    for number in numbers:
        mine = parity.split(parity.rows(number), mesh.data_ranks)[mesh.data_rank(rank)]
        for batch in nl.accumulate(model, [mine]):
            model(**batch).loss.backward()
        updates.step()
        updates.zero_grad()


def first_half(rank, family, config, folder):
    mesh, model, updates = started(rank, family, config)
    steps(mesh, rank, model, updates, range(2))
    nl.save(folder, model, updates, step=2)


def second_half(rank, family, config, folder):
    mesh, model, updates = started(rank, family, config)
    assert nl.load(folder, model, updates) == 2
    steps(mesh, rank, model, updates, range(2, 4))
    return parity.whole(model, lambda parameter: parameter.detach())


def at_once(rank, family, config):
    mesh, model, updates = started(rank, family, config)
    steps(mesh, rank, model, updates, range(4))
    return parity.whole(model, lambda parameter: parameter.detach())


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
@pytest.mark.parametrize(("before", "after"), [(ALONE, BOTH), (TENSOR, SHARDED), (SHARDED, TENSOR)])
def test_any_layout_goes_on_with_what_any_other_saved(family, before, after, tmp_path):
    (expected,) = nl.spmd.run(at_once, 1, args=(family, {}))
    nl.spmd.run(first_half, before[0], args=(family, before[1], str(tmp_path)))
    for values in nl.spmd.run(second_half, after[0], args=(family, after[1], str(tmp_path))):
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("gpt2", SLICED, ALONE),
        ("gpt2", REPLICATED, SLICED),
        ("llama", SLICED, REPLICATED),
        ("llama", OTHERWISE, SLICED),
        ("gpt2", IN_TENSORS, OTHERWISE),
    ],
)
def test_slices_of_optimizer_states_too(family, before, after, tmp_path):
    (expected,) = nl.spmd.run(at_once, 1, args=(family, {}))
    nl.spmd.run(first_half, before[0], args=(family, before[1], str(tmp_path)))
    for values in nl.spmd.run(second_half, after[0], args=(family, after[1], str(tmp_path))):
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=1e-5)


def test_with_slices_going_on_is_exact_and_every_rank_writes_its_part(tmp_path):
    ranks, config = SLICED
    expected = nl.spmd.run(at_once, ranks, args=("gpt2", config))[0]
    nl.spmd.run(first_half, ranks, args=("gpt2", config, str(tmp_path)))
    index = json.loads((tmp_path / "index.json").read_text())
    entry = index["tensors"]["optimizer/transformer.h.0.attn.c_attn.weight/exp_avg"]
    assert sorted(entry["pieces"]) == [f"rank-{rank:05d}-of-00004.safetensors" for rank in range(4)]
    assert {tuple(b["shape"]) for blocks in entry["pieces"].values() for b in blocks} == {(8, 96)}
    for values in nl.spmd.run(second_half, ranks, args=("gpt2", config, str(tmp_path))):
        for name, value in expected.items():
            assert torch.equal(values[name], value)


def test_a_fused_projection_is_saved_as_the_model_has_it(tmp_path):
    nl.spmd.run(first_half, 4, args=("gpt2", TENSOR[1], str(tmp_path)))
    index = json.loads((tmp_path / "index.json").read_text())
    entry = index["tensors"]["model/transformer.h.0.attn.c_attn.weight"]
    assert entry["shape"] == [32, 96]
    blocks = [block for blocks in entry["pieces"].values() for block in blocks]
    assert sorted(block["offset"][1] for block in blocks) == list(range(0, 96, 8))
    assert {tuple(block["shape"]) for block in blocks} == {(32, 8)}


def test_states_of_another_shape_than_a_cut_parameters_are_refused(tmp_path):
    """Adafactor keeps rows and columns of a matrix, of which each rank has other parts."""

    def work(rank):
        _, model, _ = started(rank, "llama", {"tensor_parallel_degree": 2})
        updates = torch.optim.SGD(model.parameters(), lr=1.0)
        weight = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
        updates.state[weight]["row"] = torch.zeros(3)
        nl.save(tmp_path, model, updates, step=1)

    with pytest.raises(RankError, match="keeps row of model.layers.0.self_attn.q_proj.weight in"):
        nl.spmd.run(work, 2)
