"""`nl.shard` on a ``DeviceMesh`` of the caller's, without `nl.init`."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import nearlinear as nl
from nearlinear.distributed import runtime
from tests.support import tiny

ROWS, MICRO_BATCHES = 16, 2
HYBRID = {"shape": (2, 2), "mesh_dim_names": ("replicate", "shard")}
FLAT = {"shape": (4,), "mesh_dim_names": ("shard",)}
LAYOUTS = [
    pytest.param(FLAT, {}, id="4 shards"),
    pytest.param(HYBRID, {}, id="2 replicas x 2 shards"),
    pytest.param(HYBRID, {"shard_optimizer_state": True}, id="sliced optimizer"),
    pytest.param(HYBRID, {"overlap_communication": False}, id="communication of FSDP2"),
]


def trained(rank: int, layout: dict, config: dict) -> tuple[list[float], dict]:
    """Losses and full parameters of two steps, as `tiny.train_alone` returns them."""
    mesh = init_device_mesh("cpu", layout["shape"], mesh_dim_names=layout["mesh_dim_names"])
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2()
    nl.shard(model, mesh=mesh, config=config)
    return steps(model, mesh.mesh.flatten().tolist().index(rank), mesh.size(), mesh)


def steps(model: nn.Module, data_rank: int, data_ranks: int, mesh: DeviceMesh):
    optimizer = nl.shard_optimizer(tiny.optimizer_for(model, "sgd"), model)
    losses = []
    for step in range(2):
        rows = tiny.rows(step, ROWS).chunk(data_ranks)[data_rank]
        micro_batches = [tiny.batch(ids) for ids in rows.chunk(MICRO_BATCHES)]
        total = torch.zeros(1)
        for batch in nl.accumulate(model, micro_batches):
            loss = model(**batch).loss
            loss.backward()
            total += loss.detach() * len(batch["input_ids"])
        nl.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        for dim in range(mesh.ndim):
            dist.all_reduce(total, group=mesh.get_group(dim))
        losses.append(total.item() / ROWS)
    assert not runtime.is_initialized()
    with torch.no_grad():
        return losses, {name: p.full_tensor().clone() for name, p in model.named_parameters()}


@functools.cache
def reference():
    return tiny.train_alone("gpt2", "sgd", ROWS)


@pytest.mark.parametrize(("layout", "config"), LAYOUTS)
def test_training_on_a_device_mesh_equals_one_process(layout, config):
    for run in nl.spmd.run(trained, 4, args=(layout, config)):
        assert tiny.largest_difference(run, reference()) < 1e-5


def test_training_on_a_device_mesh_equals_one_process_over_two_processes():
    layout = {"shape": (2,), "mesh_dim_names": ("shard",)}
    for run in nl.spmd.run(trained, 2, args=(layout, {}), processes=True):
        assert tiny.largest_difference(run, reference()) < 1e-5


def trained_in_pairs(rank: int):
    """Two independent jobs in one world: each pair of ranks shards a model of its own."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "shard"))
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2()
    nl.shard(model, mesh=pairs["shard"])
    return steps(model, rank % 2, 2, pairs["shard"])


def test_submeshes_train_independent_models():
    for run in nl.spmd.run(trained_in_pairs, 4):
        assert tiny.largest_difference(run, reference()) < 1e-5


class Regression(nn.Module):
    """A plain encoder in front of a stack of blocks; the output is the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(6, 8)
        self.stack = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))

    def forward(self, inputs):
        return self.stack(self.encoder(inputs)).square().mean()


def gradients_of_a_sharded_part(rank: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with nl.spmd.one_at_a_time():
        model = Regression()
    nl.shard(model.stack, mesh=mesh)
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    model(inputs.chunk(4)[rank]).backward()
    return {name: p.grad.full_tensor() for name, p in model.stack.named_parameters()}


def test_a_submodule_can_be_sharded_by_itself():
    model = Regression()
    model(torch.randn(8, 6, generator=torch.Generator().manual_seed(1))).backward()
    expected = {name: p.grad for name, p in model.stack.named_parameters()}
    for found in nl.spmd.run(gradients_of_a_sharded_part, 4):
        torch.testing.assert_close(found, expected)


def with_saved_memory(rank: int) -> tuple[list[float], dict]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2()
    nl.shard(model, mesh=mesh)
    nl.checkpoint_activations(model)
    nl.offload_activations(model)
    return steps(model, rank, 4, mesh)


def test_checkpointing_and_offload_need_no_init():
    for run in nl.spmd.run(with_saved_memory, 4):
        assert tiny.largest_difference(run, reference()) < 1e-5


def resumed(rank: int, folder) -> tuple[float, float]:
    """Loss after two steps, and after one step, a checkpoint and one step on another mesh."""
    losses = []
    for layouts in ((HYBRID, HYBRID), (HYBRID, FLAT)):
        for number, layout in enumerate(layouts):
            if number == 0 or layout is not layouts[0]:
                mesh = init_device_mesh(
                    "cpu", layout["shape"], mesh_dim_names=layout["mesh_dim_names"]
                )
                with nl.spmd.one_at_a_time(seed=number):
                    model = tiny.gpt2()
                nl.shard(model, mesh=mesh)
                optimizer = tiny.optimizer_for(model, "adamw")
            if number == 1 and layout is not layouts[0]:
                assert nl.load(folder, model, optimizer) == 1
            batch = tiny.batch(tiny.rows(number, ROWS).chunk(4)[rank])
            for micro_batch in nl.accumulate(model, [batch]):
                loss = model(**micro_batch).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0 and layouts[1] is not layouts[0]:
                nl.save(folder, model, optimizer, step=1, wait=True)
        losses.append(loss.item())
    return losses[0], losses[1]


def test_checkpoints_need_no_init(tmp_path):
    for straight, after_load in nl.spmd.run(resumed, 4, args=(tmp_path,)):
        assert after_load == pytest.approx(straight, abs=1e-5)


def save_of_a_pair(rank: int, folder) -> None:
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "shard"))
    with nl.spmd.one_at_a_time(seed=0):
        model = nl.shard(tiny.gpt2(1), mesh=pairs["shard"])
    with pytest.raises(nl.errors.CheckpointError, match="sharded over 2 of 4 ranks"):
        nl.save(folder, model)


def test_save_on_a_submesh_is_refused(tmp_path):
    nl.spmd.run(save_of_a_pair, 4, args=(tmp_path,))


def overflowing(rank: int) -> tuple[bool, float]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2(1)
    nl.shard(model, mesh=mesh, config={"fp16": True, "init_scale": 2.0**40})
    for batch in nl.accumulate(model, [tiny.batch(tiny.rows(rank, 1))]):
        model(**batch).loss.backward()
    return nl.loss_scaler(model).overflow, nl.loss_scaler(model).loss_scale


def test_loss_scale_follows_the_ranks_of_the_mesh():
    assert nl.spmd.run(overflowing, 2) == [(True, 2.0**39)] * 2


@pytest.mark.parametrize(
    ("names", "config", "message"),
    [
        (("data",), {}, r"dims \('data',\); allowed are \('shard',\)"),
        (("shard",), {"tensor_parallel_degree": 2}, "tensor_parallel_degree = 2.*call nl.init"),
        (("shard",), {"pipeline_parallel_degree": 2}, "pipeline_parallel_degree = 2.*call nl.init"),
        (("shard",), {"hybrid_shard_degree": 1}, "hybrid_shard_degree = 1, but the mesh has 2"),
    ],
)
def test_settings_that_need_init_are_refused(names, config, message):
    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=names)
        with pytest.raises(nl.errors.ConfigError, match=message):
            nl.shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh=mesh, config=config)

    nl.spmd.run(on_rank, 2)


def test_config_without_mesh_is_refused():
    with pytest.raises(nl.errors.ConfigError, match="pass the mesh too"):
        nl.shard(nn.Linear(2, 2), config={"bf16": True})
