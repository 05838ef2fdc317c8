"""The optimizer in host memory: the same numbers, the same checkpoints, on any layout."""

import pytest
import torch

import nearlinear as nl
from nearlinear.distributed import runtime
from nearlinear.fsdp.model_state import local_tensor
from tests.support import parity, tiny

OFFLOADED = {"offload_optimizer": True}
LAYOUTS = {
    "2 shards x 2 replicas, by FSDP2": (
        4,
        "gpt2",
        {"hybrid_shard_degree": 2, "overlap_communication": False},
    ),
    "2 replicas": (2, "gpt2", {"hybrid_shard_degree": 1}),
    "2 tensor x 2 shards": (4, "gpt2", {"tensor_parallel_degree": 2}),
    "2 stages x 2 shards": (4, "llama_tied", {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "2 expert x 2 shards": (4, "mixtral", {"expert_parallel_degree": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offloaded_optimizer_training_is_bit_exact(layout):
    ranks, family, config = LAYOUTS[layout]
    accumulation = 1 if "pipeline_parallel_degree" in config else 2
    expected = nl.spmd.run(parity.together, ranks, args=(family, config, accumulation))
    found = nl.spmd.run(parity.together, ranks, args=(family, config | OFFLOADED, accumulation))
    for mine, theirs in zip(found, expected, strict=True):
        assert set(parity.differences(mine, theirs).values()) == {0.0}


@pytest.mark.parametrize("two_hop", [True, False])
def test_offloaded_optimizer_with_clipping(two_hop):
    expected = tiny.train_alone("gpt2", "momentum", 16, clip=0.1)
    args = ("gpt2", 2, 2, "momentum", 16, two_hop, 2, 0.1)
    for run in nl.spmd.run(lambda rank: tiny.train_sharded(rank, *args, **OFFLOADED), 4):
        assert tiny.largest_difference(run, expected) < 2e-5


def half_a_run(rank, config, folder, numbers, load):
    mesh = nl.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2(2)
    nl.shard(model)
    fused = mesh.world > 1 and runtime.current().config.offload_optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    if load:
        nl.load(folder, model, optimizer)
        assert {group["fused"] for group in optimizer.param_groups} == {fused}
    for number in numbers:
        mine = tiny.rows(number, 8).chunk(mesh.data_ranks)[mesh.data_rank(rank)]
        for batch in nl.accumulate(model, [tiny.batch(mine)]):
            model(**batch).loss.backward()
        nl.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if not load:
        nl.save(folder, model, optimizer)
    return parity.whole(model, lambda parameter: parameter.detach())


@pytest.mark.parametrize(("before", "after"), [(OFFLOADED, {}), ({}, OFFLOADED)])
def test_checkpoints_load_with_and_without_offload(before, after, tmp_path):
    (expected,) = nl.spmd.run(half_a_run, 1, args=({}, str(tmp_path / "one"), range(4), False))
    folder = str(tmp_path / "two")
    nl.spmd.run(half_a_run, 4, args=(before, folder, range(2), False))
    for values in nl.spmd.run(half_a_run, 2, args=(after, folder, range(2, 4), True)):
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=1e-5)


def test_offload_with_sliced_optimizer_is_refused():
    with pytest.raises(
        nl.errors.ConfigError, match="before replicas could scatter them; choose one"
    ):
        nl.ParallelConfig(offload_optimizer=True, shard_optimizer_state=True)


@pytest.mark.gpu
def test_offloaded_states_are_in_host_memory():
    """Training with clipping and two micro-batches equals training without offload."""

    def train(config):
        nl.init({"bf16": True} | config)
        torch.manual_seed(0)
        model = nl.shard(tiny.gpt2(2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for number in range(3):
            for batch in nl.accumulate(model, [tiny.batch(tiny.rows(2 * number + i, 4).cuda())
                                               for i in range(2)]):  # fmt: skip
                model(**batch).loss.backward()
            nl.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        held = [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]
        devices = {local_tensor(tensor.detach()).device.type for tensor in held}
        values = {name: local_tensor(p.detach()).cpu() for name, p in model.named_parameters()}
        runtime.shutdown()
        return devices, values

    (devices, expected), (offloaded, found) = train({}), train(OFFLOADED)
    assert (devices, offloaded) == ({"cuda"}, {"cpu"})
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-4, rtol=0)
