"""Training scripts of SMP v2 (`nearlinear.compat.tsm`), written from its documentation."""

import functools
import itertools
import json
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    offload_wrapper,
)
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

import nearlinear as nl
from nearlinear.compat import tsm
from nearlinear.compat.tsm.delayed_param import DelayedParamIniter
from nearlinear.compat.tsm.distributed.checkpoint import state_dict_loader, state_dict_saver
from nearlinear.compat.tsm.distributed.checkpoint.state_dict_utils import (
    SMStateDictType,
    sm_state_dict_type,
)
from nearlinear.compat.tsm.moe.moe_config import MoEConfig
from nearlinear.context_parallel.batch import take
from nearlinear.distributed import runtime
from nearlinear.errors import CheckpointError, ConfigError
from nearlinear.fsdp.model_state import model_state
from tests.support import parity

BLOCKS = {
    "gpt2": GPT2Block,
    "llama": LlamaDecoderLayer,
    "llama_tied": LlamaDecoderLayer,
    "mixtral": MixtralDecoderLayer,
}
PLAIN_MIXTURE = MoEConfig(moe_load_balancing="none", moe_z_loss_coeff=0.0)


@pytest.fixture(autouse=True)
def restored():
    yield
    tsm.shutdown()


def batch_of(step: int) -> dict:
    ids = parity.rows(step)["input_ids"]
    return {"input_ids": ids, "labels": ids}


@functools.cache
def alone(family: str, steps: int = 2) -> tuple[list[float], dict]:
    """Losses and final values of plain PyTorch in one process."""
    model = parity.build(family)
    optimizer = parity.adamw(model, 1e-3)
    losses = []
    for step in range(steps):
        loss = model(**batch_of(step)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def prepared(config, family="llama", strategy=None, **given):
    """The model and the optimizer of a script: delayed initialization, transform, FSDP."""
    tsm.init(config)
    with nl.spmd.one_at_a_time(), torch.device("meta"):
        model = parity.unseeded(family)
    model = tsm.transform(model, config=PLAIN_MIXTURE if family == "mixtral" else None)
    initer = DelayedParamIniter(model)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={BLOCKS[family]})
    with initer.validate_params_and_buffers_inited():
        model = FSDP(
            model,
            sharding_strategy=strategy,
            auto_wrap_policy=policy,
            param_init_fn=initer.get_param_init_fn(),
            post_param_init_fn=initer.get_post_param_init_fn(),
            use_orig_params=True,
            limit_all_gathers=True,
            **given,
        )
    assert isinstance(model, FSDP) and initer.counted == initer.expected
    return model, parity.adamw(model, 1e-3)


def train(model, optimizer, steps, accumulated=1) -> list[float]:
    """The steps of a script, on this rank's rows; with context parallelism of its chunks."""
    mesh, losses = runtime.current_mesh(), []
    rank = mesh.data_rank(dist.get_rank())
    for step in steps:
        mine = parity.split(batch_of(step), mesh.data_ranks)[rank]
        parts = parity.split(mine, accumulated)
        total = torch.zeros(())
        for number, part in enumerate(parts):
            if tsm.state.cp_size > 1:
                place = tsm.state.cp_rank, tsm.state.cp_size
                part = {name: take(value, *place) for name, value in part.items()}
            last = number == len(parts) - 1
            with torch.enable_grad() if last else model.no_sync():
                loss = model(**part)["loss"] / accumulated
                loss.backward()
            total += loss.detach()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def full_values(model, translate=True) -> dict:
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=False, translate_on_save=translate)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        return model.state_dict()


def assert_values(found: dict, reference: dict) -> None:
    assert found
    for name, value in found.items():
        torch.testing.assert_close(value, reference[name], rtol=0, atol=1e-5)


def script(rank, family, config, strategy, accumulated):
    model, optimizer = prepared(config, family, strategy)
    checkpointed = functools.partial(lambda kind, part: isinstance(part, kind), BLOCKS[family])
    apply_activation_checkpointing(model, check_fn=checkpointed)
    model = offload_wrapper(model)
    policy = model_state(model.module).activations
    assert policy.strategy.group_size == 1 and len(policy.blocks) == 2 and policy.offload
    losses = train(model, optimizer, range(2), accumulated)
    return losses, full_values(model, translate=False)


HYBRID, FULL = ShardingStrategy.HYBRID_SHARD, ShardingStrategy.FULL_SHARD
LAYOUTS = {
    "all ranks": (2, "llama", {"hybrid_shard_degree": 0}, FULL, 1),
    "no shards": (2, "gpt2", {"hybrid_shard_degree": 1}, ShardingStrategy.NO_SHARD, 1),
    "shards 2 x replicas 2": (4, "llama_tied", {"hybrid_shard_degree": 2}, HYBRID, 2),
    "tensor 2": (4, "llama", {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}, None, 1),
    "experts 2": (2, "mixtral", {"expert_parallel_degree": 2}, FULL, 1),
    "context 2": (4, "llama", {"context_parallel_degree": 2, "hybrid_shard_degree": 2}, HYBRID, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_script_equals_one_process(layout):
    """Delayed init, activation checkpointing and offload, no_sync, clipping, full state."""
    ranks, family, *arguments = LAYOUTS[layout]
    losses, values = alone(family)
    for found, state in nl.spmd.run(script, ranks, args=(family, *arguments)):
        assert found == pytest.approx(losses, abs=1e-5)
        assert state.keys() == values.keys()
        assert_values(state, values)


def sharded_state(model, optimizer, **values) -> dict:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return {
            "model": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer),
            **values,
        }


def saving(rank, folder, config, asynchronous):
    model, optimizer = prepared(config)
    train(model, optimizer, [0])
    values = {"total_steps": 1, "rng": torch.arange(3), "place": (0, 7), "rank": rank}
    state = sharded_state(model, optimizer, **values)
    own = f"{folder}/tp{tsm.state.tp_rank}"  # scripts name a folder per tensor rank
    if not asynchronous:
        return state_dict_saver.save(state, checkpoint_id=own)
    state_dict_saver.async_save(state, checkpoint_id=own, queue=state_dict_saver.AsyncCallsQueue())
    assert state_dict_saver.maybe_finalize_async_calls(blocking=True) == [1]
    assert state_dict_saver.maybe_finalize_async_calls(blocking=False) == []


def resuming(rank, folder, config):
    """Load in the order of scripts: model first, then its optimizer by torch's function."""
    model, optimizer = prepared(config)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "total_steps": 0, "rng": None, "place": 0, "rank": 9}
        reader = dcp.FileSystemReader(f"{folder}/tp{tsm.state.tp_rank}")
        state_dict_loader.load(state, storage_reader=reader)
        found = load_sharded_optimizer_state_dict(
            model_state_dict=state["model"],
            optimizer_key="optimizer",
            storage_reader=reader,
            process_group=model.process_group,
        )
        optimizer.load_state_dict(
            FSDP.optim_state_dict_to_load(model, optimizer, found["optimizer"])
        )
    model.load_state_dict(state["model"])
    assert (state["total_steps"], state["place"], state["rank"]) == (1, (0, 7), 0)
    assert state["rng"].tolist() == [0, 1, 2]
    return train(model, optimizer, [1]), full_values(model)


def test_sharded_checkpoint_resumes_at_another_degree(tmp_path):
    losses, values = alone("llama")
    config = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}
    nl.spmd.run(saving, 4, args=(tmp_path, config, False))
    for found, state in nl.spmd.run(resuming, 2, args=(tmp_path, {"hybrid_shard_degree": 2})):
        assert found == pytest.approx(losses[1:], abs=1e-5)
        assert_values(state, values)


def test_async_checkpoint_in_s3(aws_services):
    folder = "s3://my-bucket/run/step-1"
    nl.spmd.run(saving, 2, args=(folder, {"hybrid_shard_degree": 2}, True))

    def load_all(rank):
        model, optimizer = prepared({"hybrid_shard_degree": 1})
        state = sharded_state(model, optimizer, total_steps=0)
        where = {"checkpoint_id": f"{folder}/tp0", "s3_region": "us-west-2"}
        with pytest.raises(CheckpointError, match=r"has \['place', 'rank', 'rng'\], which"):
            state_dict_loader.load(state, **where)
        state_dict_loader.load(state, check_keys_matched=False, **where)
        assert (
            state["total_steps"] == 1 and "exp_avg" in state["optimizer"]["state"]["lm_head.weight"]
        )
        return train(model, optimizer, [1])

    for found in nl.spmd.run(load_all, 2):
        assert found == pytest.approx(alone("llama")[0][1:], abs=1e-5)


def local_script(rank, folder, config, save):
    model, optimizer = prepared(config)
    folder = f"{folder}/tp{tsm.state.tp_rank}_ep{tsm.state.ep_rank}_fsdp{model.rank}"
    if save:
        train(model, optimizer, [0])
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
        if not save:
            state_dict_loader.load(state, checkpoint_id=folder)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            return train(model, optimizer, [1])
        if rank < tsm.state.hybrid_shard_degree:  # the ranks of one replica, without the others
            state_dict_saver.async_save(state, checkpoint_id=folder)
            state_dict_saver.maybe_finalize_async_calls()
    return None


def test_local_checkpoint_keeps_the_shard_degree_and_changes_replicas(tmp_path):
    nl.spmd.run(local_script, 4, args=(tmp_path, {"hybrid_shard_degree": 2}, True))
    arguments = (tmp_path, {"hybrid_shard_degree": 2}, False)
    for found in nl.spmd.run(local_script, 2, args=arguments):
        assert found == pytest.approx(alone("llama")[0][1:], abs=1e-5)
    with pytest.raises(nl.spmd.RankError, match="at the shard degree that saved it"):
        nl.spmd.run(local_script, 1, args=(tmp_path, {"hybrid_shard_degree": 1}, False))


def full_script(rank, path, save):
    """Save a model with split matrices in the form of Hugging Face; load both states elsewhere."""
    model, optimizer = prepared({"tensor_parallel_degree": 2} if save else {}, "llama_tied")
    if not save:
        model.load_state_dict(torch.load(path / "model.pt"))
        values = torch.load(path / "optimizer.pt")
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            loadable = FSDP.optim_state_dict_to_load(model, optimizer, values)
        optimizer.load_state_dict(loadable)
        return train(model, optimizer, [1])
    train(model, optimizer, [0])
    configs = (
        FullStateDictConfig(rank0_only=True, offload_to_cpu=True, translate_on_save=True),
        FullOptimStateDictConfig(rank0_only=True),
    )
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        state, values = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    assert FSDP.get_state_dict_type(model).state_dict_config.translate_on_save is False
    assert bool(state) == bool(values) == (rank == 0)
    if rank == 0:
        torch.save(state, path / "model.pt")
        torch.save(values, path / "optimizer.pt")
    return sorted(state)


def test_full_states_of_a_split_model(tmp_path):
    losses, values = alone("llama_tied")
    names, others = nl.spmd.run(full_script, 2, args=(tmp_path, True))
    assert names == sorted(values.keys() - {"lm_head.weight"}) and others == []
    model = parity.build("llama_tied")
    model.load_state_dict(torch.load(tmp_path / "model.pt"), strict=False)
    model.tie_weights()
    assert model(**batch_of(1)).loss.item() == pytest.approx(losses[1], abs=1e-5)
    for found in nl.spmd.run(full_script, 2, args=(tmp_path, False)):
        assert found == pytest.approx(losses[1:], abs=1e-5)
