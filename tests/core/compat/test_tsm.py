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
from nearlinear.errors import CheckpointError, ConfigError
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
    policy = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={BLOCKS[family]}
    )
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
    mesh, losses = nl.Mesh.from_config(nl.ParallelConfig(), 1), []
    from nearlinear.distributed import runtime

    mesh = runtime.current_mesh()
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
    config = FullStateDictConfig(
        offload_to_cpu=True, rank0_only=False, translate_on_save=translate
    )
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
    losses = train(model, optimizer, range(2), accumulated)
    return losses, full_values(model, translate=False), type(model.module).__name__


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
    for found, state, _ in nl.spmd.run(script, ranks, args=(family, *arguments)):
        assert found == pytest.approx(losses, abs=1e-5)
        assert state.keys() == values.keys()
        assert_values(state, values)
