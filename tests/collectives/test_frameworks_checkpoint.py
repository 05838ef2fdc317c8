"""Distributed checkpoints and full state dicts, saved and loaded in another layout."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.collectives import training
from tests.collectives.training import make_model, same_as_gloo, summary

both = pytest.mark.parametrize("ranks", [2, 4])


def sharded(mesh_shape=None):
    shape = mesh_shape or (dist.get_world_size(),)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = make_model()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def save_and_go_on(rank, folder, asynchronous):
    """Train, save and continue; then load the checkpoint in another layout and continue again."""
    path = f"{folder}/{dist.get_backend()}"
    model, optimizer = sharded()
    training.train(model, optimizer, rank, steps=2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if asynchronous:
        saving = dcp.async_save(state, checkpoint_id=path)
        saving.result()
    else:
        dcp.save(state, checkpoint_id=path)
    went_on = training.train(model, optimizer, rank)

    other, its_optimizer = sharded((2, dist.get_world_size() // 2))
    state = dict(zip(("model", "optimizer"), get_state_dict(other, its_optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        other,
        its_optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    assert training.train(other, its_optimizer, rank) == pytest.approx(went_on, rel=1e-5)
    return went_on + summary(other)


@both
@pytest.mark.parametrize("asynchronous", [False, True])
def test_distributed_checkpoint_loads_in_another_layout(pool, tmp_path, asynchronous, ranks):
    same_as_gloo(pool, save_and_go_on, str(tmp_path), asynchronous, ranks=ranks)


def through_rank_zero(rank):
    """Gather the full state on rank 0 and load it into a new model on all ranks."""
    model, optimizer = sharded()
    losses = training.train(model, optimizer, rank)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    assert bool(full) == (rank == 0)
    fresh, _ = sharded()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(fresh, full, options=options)
    assert summary(fresh) == summary(model)
    return losses + summary(fresh)


@both
def test_full_state_dict_loads_from_rank_zero(pool, ranks):
    same_as_gloo(pool, through_rank_zero, ranks=ranks)
