"""Resume on a layout that differs from the saved one, also with fused and tied weights."""

import functools
import json

import pytest
import torch

import nearlinear as nl
from nearlinear.checkpoint import index
from nearlinear.errors import RankError
from tests.support import parity

SINGLE_RANK = (1, {})
SHARDED = (4, {"hybrid_shard_degree": 4})
TENSOR = (4, {"tensor_parallel_degree": 4})
TENSOR_AND_SHARD = (8, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2})
REPLICATED = (4, {"hybrid_shard_degree": 2})
SHARDED_OPTIMIZER = (4, {"hybrid_shard_degree": 2, "shard_optimizer_state": True})
REPLICATED_SHARDED_OPTIMIZER = (4, {"hybrid_shard_degree": 1, "shard_optimizer_state": True})
REPLICATED_OF_FOUR = (8, {"hybrid_shard_degree": 4, "shard_optimizer_state": True})
TENSOR_SHARDED_OPTIMIZER = (4, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1}
              | {"shard_optimizer_state": True, "overlap_communication": False})  # fmt: skip


def build(rank, family, config):
    mesh = nl.init(config)
    with nl.deferred_init():
        name, _, experts = family.partition(" of ")
        model = parity.unseeded(name, **({"num_local_experts": int(experts)} if experts else {}))
    model = nl.shard(nl.transform(model))
    return mesh, model, nl.shard_optimizer(parity.adamw(model, 1e-3), model)


def train_steps(mesh, rank, model, optimizer, numbers) -> None:
    for number in numbers:
        mine = parity.split(parity.rows(number), mesh.data_ranks)[mesh.data_rank(rank)]
        for batch in nl.accumulate(model, [mine]):
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_and_save(rank, family, config, folder):
    mesh, model, optimizer = build(rank, family, config)
    train_steps(mesh, rank, model, optimizer, range(2))
    nl.save(folder, model, optimizer, step=2)


def load_and_train(rank, family, config, folder):
    mesh, model, optimizer = build(rank, family, config)
    assert nl.load(folder, model, optimizer) == 2
    train_steps(mesh, rank, model, optimizer, range(2, 4))
    return parity.whole(model, lambda parameter: parameter.detach())


def train_uninterrupted(rank, family, config):
    mesh, model, optimizer = build(rank, family, config)
    train_steps(mesh, rank, model, optimizer, range(4))
    return parity.whole(model, lambda parameter: parameter.detach())


@functools.cache
def single_rank(family):
    """Return the values of an uninterrupted run in one process."""
    (values,) = nl.spmd.run(train_uninterrupted, 1, args=(family, {}))
    return values


def assert_resumed_run_equals_single_rank(family, before, after, folder):
    """Save in the layout ``before``, given as (ranks, config), and resume in ``after``."""
    nl.spmd.run(train_and_save, before[0], args=(family, before[1], str(folder)))
    for values in nl.spmd.run(load_and_train, after[0], args=(family, after[1], str(folder))):
        for name, value in single_rank(family).items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("gpt2", SINGLE_RANK, TENSOR_AND_SHARD),
        ("llama", SINGLE_RANK, TENSOR_AND_SHARD),
        ("mixtral", SINGLE_RANK, TENSOR_AND_SHARD),
        ("gpt2", TENSOR, SHARDED),
        ("mixtral", TENSOR, SHARDED),
        ("llama", SHARDED, TENSOR),
    ],
)
def test_resume_on_another_layout_matches_single_rank(family, before, after, tmp_path):
    assert_resumed_run_equals_single_rank(family, before, after, tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [(SHARDED, SHARDED_OPTIMIZER), (SINGLE_RANK, SHARDED), (REPLICATED_OF_FOUR, SINGLE_RANK)],
)
def test_stacked_experts_are_sharded_evenly_and_resume_on_another_layout(before, after, tmp_path):
    assert_resumed_run_equals_single_rank("mixtral of 2", before, after, tmp_path)


def held_experts(rank, config):
    _, model, _ = build(rank, "mixtral of 2", config)
    experts = {n: p for n, p in model.named_parameters() if ".experts." in n}
    return [(p.to_local().numel(), p.numel()) for p in experts.values()]


def test_ranks_hold_equal_parts_of_fewer_experts():
    for sizes in nl.spmd.run(held_experts, 4, args=(SHARDED[1],)):
        assert sizes and all(4 * part == whole for part, whole in sizes)


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("gpt2", SHARDED_OPTIMIZER, SINGLE_RANK),
        ("gpt2", REPLICATED, SHARDED_OPTIMIZER),
        ("llama", SHARDED_OPTIMIZER, REPLICATED),
        ("llama", REPLICATED_SHARDED_OPTIMIZER, SHARDED_OPTIMIZER),
        ("gpt2", TENSOR_SHARDED_OPTIMIZER, REPLICATED_SHARDED_OPTIMIZER),
    ],
)
def test_resume_with_sharded_optimizer_state_matches_single_rank(family, before, after, tmp_path):
    assert_resumed_run_equals_single_rank(family, before, after, tmp_path)


def test_sharded_optimizer_state_is_written_by_all_ranks_and_resumes_exactly(tmp_path):
    ranks, config = SHARDED_OPTIMIZER
    expected = nl.spmd.run(train_uninterrupted, ranks, args=("gpt2", config))[0]
    nl.spmd.run(train_and_save, ranks, args=("gpt2", config, str(tmp_path)))
    index = json.loads((tmp_path / "index.json").read_text())
    entry = index["tensors"]["optimizer/transformer.h.0.attn.c_attn.weight/exp_avg"]
    assert sorted(entry["pieces"]) == [f"rank-{rank:05d}-of-00004.safetensors" for rank in range(4)]
    assert {tuple(b["shape"]) for blocks in entry["pieces"].values() for b in blocks} == {(8, 96)}
    for values in nl.spmd.run(load_and_train, ranks, args=("gpt2", config, str(tmp_path))):
        for name, value in expected.items():
            assert torch.equal(values[name], value)


def test_fused_projection_is_saved_in_model_layout(tmp_path):
    nl.spmd.run(train_and_save, 4, args=("gpt2", TENSOR[1], str(tmp_path)))
    index = json.loads((tmp_path / "index.json").read_text())
    entry = index["tensors"]["model/transformer.h.0.attn.c_attn.weight"]
    assert entry["shape"] == [32, 96]
    blocks = [block for blocks in entry["pieces"].values() for block in blocks]
    assert sorted(block["offset"][1] for block in blocks) == list(range(0, 96, 8))
    assert {tuple(block["shape"]) for block in blocks} == {(32, 8)}


def save_pipeline(rank, folder):
    nl.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("gpt2")
    model = nl.shard(nl.pipeline(model))
    nl.save(f"{folder}/with", model, parity.adamw(model, 1e-3), wait=True)
    nl.save(f"{folder}/without", model, wait=True)


def test_optimizer_settings_name_parameters_of_all_pipeline_stages(tmp_path):
    nl.spmd.run(save_pipeline, 2, args=(str(tmp_path),))
    (group,) = index.read(tmp_path / "with").values["optimizer"]["groups"]
    names = [name for name, _ in parity.build("gpt2").named_parameters()]
    assert sorted(group["params"]) == sorted(names)
    assert "optimizer" not in index.read(tmp_path / "without").values


def test_save_rejects_optimizer_state_of_another_shape_than_its_shard(tmp_path):
    """Store row statistics of a sharded matrix, as Adafactor does."""

    def work(rank):
        _, model, _ = build(rank, "llama", {"tensor_parallel_degree": 2})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        weight = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
        optimizer.state[weight]["row"] = torch.zeros(3)
        nl.save(tmp_path, model, optimizer, step=1)

    with pytest.raises(RankError, match="keeps row of model.layers.0.self_attn.q_proj.weight in"):
        nl.spmd.run(work, 2)
