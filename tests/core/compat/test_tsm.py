"""Training scripts of SMP v2 (`nearlinear.compat.tsm`), written from its documentation."""

import copy
import functools
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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
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
from transformers import AutoModelForCausalLM
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
    warn_without_effect,
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
        model.save_pretrained(path / "hugging_face", state_dict=dict(state))
    return sorted(state)


def test_full_states_of_a_split_model(tmp_path):
    losses, values = alone("llama_tied")
    names, others = nl.spmd.run(full_script, 2, args=(tmp_path, True))
    assert names == sorted(values.keys() - {"lm_head.weight"}) and others == []
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hugging_face")
    assert model(**batch_of(1)).loss.item() == pytest.approx(losses[1], abs=1e-5)
    for found in nl.spmd.run(full_script, 2, args=(tmp_path, False)):
        assert found == pytest.approx(losses[1:], abs=1e-5)


def torch_state_dicts(rank):
    """Model and optimizer through torch.distributed.checkpoint.state_dict."""
    model, optimizer = prepared({"hybrid_shard_degree": 2})
    train(model, optimizer, [0])
    states = copy.deepcopy(get_state_dict(model, optimizer))
    train(model, optimizer, [1])
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    return model.sharding_strategy, train(model, optimizer, [1])


def test_torchs_functions_for_state_dicts():
    for strategy, found in nl.spmd.run(torch_state_dicts, 4):
        assert strategy is HYBRID and found == pytest.approx(alone("llama")[0][1:], abs=1e-5)


def experts_script(rank, folder, config, save):
    """Sinkhorn routing and a full state of divided experts in the form of Hugging Face."""
    tsm.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.unseeded("mixtral")
    model = FSDP(tsm.transform(model, config={"moe_load_balancing": "sinkhorn"}))
    optimizer = parity.adamw(model, 1e-3)
    if save:
        train(model, optimizer, [0])
        config = FullStateDictConfig(rank0_only=True, translate_on_save=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            state = model.state_dict()
        if rank == 0:
            torch.save(state, folder / "model.pt")
    model.load_state_dict(torch.load(folder / "model.pt") if not save else full_values(model))
    model.eval()
    with torch.no_grad():
        return model(**batch_of(1)).loss.item(), sorted(full_values(model))


def test_full_state_of_divided_experts(tmp_path):
    config = {"expert_parallel_degree": 2}
    found = nl.spmd.run(experts_script, 2, args=(tmp_path, config, True))
    loaded = nl.spmd.run(experts_script, 1, args=(tmp_path, {}, False))
    for loss, names in (*found, *loaded):
        assert loss == pytest.approx(found[0][0], abs=1e-5) and names == found[0][1]
    assert any("experts.3.w" in name for name in found[0][1])


def torch_checkpoint(rank, folder):
    """Save and resume with torch's own functions, one folder for each tensor rank."""
    config = {"tensor_parallel_degree": 2}
    model, optimizer = prepared(config)
    train(model, optimizer, [0])
    folder = f"{folder}/tp{tsm.state.tp_rank}"
    dcp.save(
        sharded_state(model, optimizer, total_steps=1),
        storage_writer=dcp.FileSystemWriter(folder),
        process_group=model.process_group,
    )
    model, optimizer = prepared(config)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "total_steps": 0}
        reader = dcp.FileSystemReader(folder)
        dcp.load(state, storage_reader=reader, process_group=model.process_group)
        found = load_sharded_optimizer_state_dict(
            state["model"], "optimizer", reader, process_group=model.process_group
        )
        optimizer.load_state_dict(
            FSDP.optim_state_dict_to_load(model, optimizer, found["optimizer"])
        )
    model.load_state_dict(state["model"])
    assert state["total_steps"] == 1
    return train(model, optimizer, [1]), full_values(model)


def test_checkpoint_by_torchs_own_functions(tmp_path):
    losses, values = alone("llama")
    for found, state in nl.spmd.run(torch_checkpoint, 4, args=(tmp_path,)):
        assert found == pytest.approx(losses[1:], abs=1e-5)
        assert_values(state, values)


class Custom(nn.Module):
    """A model that is not built from a config of Hugging Face."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def fill(module):
    """Initialize one module by a rule of its own."""
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.5)
    for buffer in module.buffers(recurse=False):
        buffer.fill_(3.0)


def initialized(rank, how):
    tsm.init({"hybrid_shard_degree": 0, "random_seed": 5})
    with torch.device("meta"):
        model = Custom()
    given = {}
    if how == "initer":
        initer = DelayedParamIniter(model, init_method_using_config=fill)
        given = {"param_init_fn": initer.get_param_init_fn()}
    elif how == "param_init_fn":

        def allocate_and_fill(module):
            fill(module.to_empty(device="cpu", recurse=False))

        given = {"param_init_fn": allocate_and_fill}
    elif how == "sync_module_states":
        if rank == 0:
            with nl.spmd.one_at_a_time(seed=7):
                model = Custom()
        given = {
            "sync_module_states": True,
            "param_init_fn": lambda module: module.to_empty(device="cpu", recurse=False),
        }
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **given)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return full_values(model, translate=False), model.scale.item()


def test_other_ways_to_initialize_a_meta_model():
    """Values are those of one process, whoever provides them."""
    for how, scale in (("initer", 3.0), ("param_init_fn", 3.0), ("sync_module_states", 2.0)):
        (reference,) = nl.spmd.run(initialized, 1, args=(how,))
        for values, found in nl.spmd.run(initialized, 2, args=(how,)):
            assert found == reference[1] == scale
            assert_values(values, reference[0])
            assert values["layers.0.weight"].std() > 0.1
    with pytest.raises(nl.spmd.RankError, match="Custom has parameters or buffers on the meta"):
        nl.spmd.run(initialized, 1, args=("default",))


def test_validation_of_delayed_initialization():
    tsm.init()
    with torch.device("meta"):
        model = parity.unseeded("gpt2")
    initer = DelayedParamIniter(model, verbose=True)
    with pytest.raises(AssertionError, match="still on the meta device"):
        with initer.validate_params_and_buffers_inited():
            pass
    with initer.validate_params_and_buffers_inited(enabled=False):
        pass
    with pytest.raises(AssertionError, match=r"64 parameters are initialized, and the model has"):
        with initer.validate_params_and_buffers_inited():
            FSDP(model, param_init_fn=initer.get_param_init_fn())
            initer.count_num_params(model.transformer.ln_f)
    for module in model.modules():
        initer.count_num_params(module)
    with initer.validate_params_and_buffers_inited():
        pass


def exchanged(rank):
    tsm.init({"context_parallel_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.unseeded("llama")
    model = FSDP(tsm.transform(model, cp_comm_type="all_gather"))
    name = type(model_state(model.module).extensions[0].exchange).__name__
    return name, train(model, parity.adamw(model, 1e-3), [0])


def test_exchange_of_context_ranks():
    for name, losses in nl.spmd.run(exchanged, 2):
        assert name == "AllGatherExchange"
        assert losses == pytest.approx(alone("llama")[0][:1], abs=1e-5)


def from_rank0(rank, asked):
    """A pretrained model on rank 0 only; ``asked``: whether transform distributes it, or None."""
    tsm.init({"tensor_parallel_degree": 1 if asked is None else 2, "random_seed": 3})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.unseeded("llama")
    if rank:
        with nl.spmd.one_at_a_time(), torch.device("meta"):
            model = parity.unseeded("llama")
    if asked is not None:
        model = tsm.transform(model, dtype=torch.float32, load_state_dict_from_rank0=asked)
    elif rank:
        DelayedParamIniter(model)  # values that those of rank 0 replace
    model = FSDP(
        model, sync_module_states=True, cpu_offload=CPUOffload(True), device_id=torch.device("cpu")
    )
    return train(model, parity.adamw(model, 1e-3), [0])


def test_values_of_rank_0():
    for asked in (True, None):
        for found in nl.spmd.run(from_rank0, 2, args=(asked,)):
            assert found == pytest.approx(alone("llama")[0][:1], abs=1e-5)
    with pytest.raises(nl.spmd.RankError, match="has no values on this rank: pass load_state"):
        nl.spmd.run(from_rank0, 2, args=(False,))


def mixed(rank, lower):
    tsm.init()
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.unseeded("gpt2")
    precision = MixedPrecision(torch.bfloat16, reduce_dtype=lower, buffer_dtype=lower)
    model = FSDP(model, None, ShardingStrategy.SHARD_GRAD_OP, mixed_precision=precision)
    output = model(**batch_of(0))
    output.loss.backward()
    return output.logits.dtype, {p.grad.dtype for p in model.parameters()}, output.loss.item()


def test_mixed_precision_computes_in_bfloat16_with_float32_gradients(caplog):
    caplog.set_level(logging.INFO)
    for dtype, gradients, loss in nl.spmd.run(mixed, 2, args=(torch.bfloat16,)):
        assert (dtype, gradients) == (torch.bfloat16, {torch.float32})
        assert loss == pytest.approx(alone("gpt2")[0][0], abs=2e-2)
    assert "reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16): float32 is" in caplog.text


def test_hybrid_shard_degree_0_follows_the_strategy(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"hybrid_shard_degree": 0}')
    expected = {None: 4, FULL: 4, HYBRID: 2, ShardingStrategy.NO_SHARD: 1}

    def sharing(rank):
        found = {}
        for strategy in expected:
            tsm.init({})
            model = FSDP(Custom(), sharding_strategy=strategy)
            assert model.rank == rank % expected[strategy]
            found[strategy] = model.process_group.size()
        return found

    assert nl.spmd.run(sharing, 4) == [expected] * 4


def state_of_rank(rank):
    tsm.init({"tensor_parallel_degree": 2, "context_parallel_degree": 2})
    assert tsm.is_initialized()
    found = {
        name: getattr(tsm.state, name)
        for name in (
            "hybrid_shard_degree rank world_size tensor_parallel_degree tp_size tp_rank cp_size "
            "cp_rank ep_size ep_rank sm_activation_offloading activation_loading_horizon"
        ).split()
    }
    groups = {
        "tp": tsm.state.tp_process_group,
        "cp": tsm.state.cp_process_group,
        "ep": tsm.state.ep_process_group,
        "rep_rank": tsm.state.rep_rank_process_group,
        "world": tsm.state.world_process_group,
    }
    found |= {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    tsm.state.activation_loading_horizon = 5
    assert runtime.current().config.activation_loading_horizon == 5
    tsm.state.tp_size = 2
    tsm.state.unknown = rank
    assert tsm.state.unknown in range(4)
    with pytest.raises(ConfigError, match="tp_size = 3: the layout of the running job is 2; give"):
        tsm.state.tp_size = 3
    return found


def test_state(caplog, monkeypatch):
    monkeypatch.setitem(vars(tsm.state), "unknown", 0)
    found = nl.spmd.run(state_of_rank, 4)[3]
    assert found == {
        "hybrid_shard_degree": 2, "rank": 3, "world_size": 4, "tensor_parallel_degree": 2,
        "tp_size": 2, "tp_rank": 1, "cp_size": 2, "cp_rank": 1, "ep_size": 1, "ep_rank": 0,
        "sm_activation_offloading": True, "activation_loading_horizon": 2, "tp": [2, 3],
        "cp": [1, 3], "ep": [3], "rep_rank": [1, 3], "world": [0, 1, 2, 3],
    }  # fmt: skip
    assert "tsm.state.unknown = 3 has no effect here" in caplog.text


def test_precedence_and_keys_without_effect(monkeypatch, tmp_path, caplog):
    given = {"activation_loading_horizon": 3, "random_seed": 3, "allow_empty_shards": True}
    (tmp_path / "config.json").write_text(json.dumps(given))
    line = '{"random_seed": 4, "activation_loading_horizon": 4}'
    monkeypatch.setattr("sys.argv", ["train.py", "--mp_parameters", line, "--steps=3"])
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"tensor_parallel_seed": 5}')
    for config in (given, tmp_path / "config.json", str(tmp_path / "config.json")):
        caplog.clear()
        tsm.init(config)
        settings = runtime.current().config
        assert (settings.random_seed, settings.activation_loading_horizon) == (5, 4)
        assert "without effect here: allow_empty_shards" in caplog.text
    monkeypatch.setattr("sys.argv", ["train.py", "--mp_parameters=[1]"])
    with pytest.raises(ConfigError, match=r"--mp_parameters \[1\]: expected a JSON object"):
        tsm.init()
    monkeypatch.setattr("sys.argv", ["train.py"])
    with pytest.raises(ConfigError, match="context_parallel_degree"):
        tsm.init({"context_paralel_degree": 2})
    with pytest.raises(ConfigError, match="context_parallel_degree = 2 does not divide"):
        tsm.init({"context_parallel_degree": 2, "hybrid_shard_degree": 1})


def test_keys_are_those_of_the_configuration():
    defaults = nl.ParallelConfig()
    for name, key in tsm.job.KEYS.items():
        assert getattr(defaults, key.equivalent or name) == key.default, name


REFUSED = {
    "ignored_modules=": lambda model: FSDP(model, ignored_modules=[model.layers[0]]),
    "device_mesh=": lambda model: FSDP(model, device_mesh=object()),
    "hybrid_shard_degree shards over": lambda model: FSDP(
        model, process_group=tsm.state.tp_process_group
    ),
    "a part of the model is wrapped already": lambda model: FSDP(nn.Sequential(FSDP(model))),
    "float16 needs the loss scale": lambda model: FSDP(
        model, mixed_precision=MixedPrecision(torch.float16)
    ),
    "pass transformer_auto_wrap_policy": lambda model: FSDP(model, auto_wrap_policy=3),
    "only 2 is supported": lambda model: FSDP(model).clip_grad_norm_(1.0, norm_type=1.0),
    "call model.apply": lambda model: FSDP(model).apply(print),
    "Remove the hook": lambda model: FSDP(model).register_comm_hook(None, print),
    "summon_full_params is not supported": lambda model: FSDP.summon_full_params(FSDP(model)),
    "in a job without float8": lambda model: tsm.transformer_engine.fp8_autocast().__enter__(),
    "needs the settings of the mixtures": lambda model: (
        tsm.init({"expert_parallel_degree": 2}),
        tsm.transform(model),
    ),
    "cannot be saved": lambda model: state_dict_saver.save(
        sharded_state(model := FSDP(model), parity.adamw(model, 1e-3), other=Custom()),
        checkpoint_id="x",
    ),
    "has no sharded model": lambda model: state_dict_saver.save({"a": 1}, checkpoint_id="x"),
    "pass checkpoint_id=": lambda model: state_dict_loader.load({"a": 1}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_with_a_reason(words):
    def attempt(rank):
        tsm.init()
        with pytest.raises((ConfigError, CheckpointError), match=words):
            REFUSED[words](Custom())

    nl.spmd.run(attempt, 2)


def test_torch_is_untouched_before_init_and_after_shutdown():
    own = vars(FSDP)["state_dict_type"], FullStateDictConfig.__init__
    code = apply_activation_checkpointing.__code__
    before = load_sharded_optimizer_state_dict.__code__
    tsm.init()
    assert vars(FSDP)["state_dict_type"] is not own[0]
    FullStateDictConfig(translate_on_save=True)
    assert isinstance(FSDP(Custom()), FSDP)
    tsm.shutdown()
    assert (vars(FSDP)["state_dict_type"], FullStateDictConfig.__init__) == own
    assert apply_activation_checkpointing.__code__ is code
    assert load_sharded_optimizer_state_dict.__code__ is before
    assert not tsm.is_initialized()
    model = nn.Linear(2, 2)
    assert type(offload_wrapper(model)).__name__ == "OffloadWrapper"
    with pytest.raises(TypeError, match="translate_on_save"):
        FullStateDictConfig(translate_on_save=True)
    assert type(FSDP(model, device_id=torch.device("cpu"))) is FSDP


def reference_attention(q, k, v, bias):
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    return (scores + bias).softmax(-1) @ v


@pytest.mark.parametrize("layout", ["b h s d", "b s h d"])
def test_attention_modules(layout):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 6, 5, 8, generator=generator)
    order = (lambda x: x) if layout == "b h s d" else (lambda x: x.transpose(1, 2))
    dim = 1 if layout == "b h s d" else 2
    qkv = torch.stack([order(q), order(k), order(v)], dim)
    hidden = torch.full((5, 5), -torch.inf).triu(1)
    seen = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    seen[1, ..., 4] = False
    masked = torch.zeros(2, 1, 5, 5).masked_fill(~seen, -torch.inf)
    attention = tsm.nn.attn.FlashSelfAttention()
    distance = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])
    cases = [
        (attention(qkv, layout=layout), 0.0),
        (attention(qkv, causal=True, layout=layout), hidden),
        (attention(qkv, seen, causal=True, layout=layout), hidden + masked),
        (
            tsm.nn.attn.FlashSelfAttention(use_alibi=True)(qkv, causal=True, layout=layout),
            hidden - slopes[:, None, None] * distance,
        ),
    ]
    for found, bias in cases:
        torch.testing.assert_close(found, reference_attention(q, k, v, bias))
    kv = torch.stack([order(k[:, :2]), order(v[:, :2])], dim)
    grouped = tsm.nn.attn.FlashGroupedQueryAttention()
    found = grouped(order(q), kv, causal=True, layout=layout, cast_dtype=torch.float64)
    assert found.dtype == torch.float64
    expected = reference_attention(q, k[:, :2], v[:, :2], hidden)
    torch.testing.assert_close(found.float(), expected)
    with pytest.raises(ConfigError, match="layout = 'b d'"):
        attention(qkv, layout="b d")


def test_modules_of_the_public_tree():
    module = tsm.utils.module_utils.empty_module_params(nn.Linear(2, 3), device="meta")
    assert module.weight.is_meta and module.weight.shape == (3, 2)
    with torch.device("meta"):
        norm = nn.BatchNorm1d(3)
    moved = tsm.utils.module_utils.move_buffers_to_device(norm, "cpu")
    assert moved.weight.is_meta and not moved.running_mean.is_meta
    config = parity.build("llama").config
    layer = tsm.nn.huggingface.llama_flashattn.LlamaFlashAttention(config)
    assert layer.config._attn_implementation == "sdpa"
    with tsm.transformer_engine.fp8_autocast(
        enabled=False, fp8_recipe=tsm.transformer_engine.DelayedScaling()
    ):
        pass


def test_settings_of_mixtures():
    router = MoEConfig(use_cpu_initialization=True).router()
    assert (router.moe_load_balancing, router.moe_z_loss_coeff) == ("sinkhorn", 0.001)
    given = {
        "smp_moe": False,
        "random_seed": 1,
        "moe_load_balancing": "aux_loss",
        "global_token_shuffle": True,
        "moe_all_to_all_dispatcher": False,
        "moe_aux_loss_coeff": 0.5,
        "moe_z_loss_coeff": 0.25,
    }
    assert vars(MoEConfig(**given).router()) == given


def test_arguments_without_effect_are_accepted_with_one_warning(caplog, tmp_path):
    warn_without_effect.cache_clear()
    tsm.init()
    model = tsm.transform(Custom(), device="cpu")
    model = FSDP(
        model, forward_prefetch=True, limit_all_gathers=False, backward_prefetch=None, device_id=0
    )
    assert "forward_prefetch and limit_all_gathers have no effect" in caplog.text
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        state_dict_saver.async_save(
            sharded_state(model, optimizer),
            storage_writer=dcp.FileSystemWriter(tmp_path / "checkpoint"),
            planner=dcp.DefaultSavePlanner(),
            process_group=model.process_group,
            coordinator_rank=0,
            queue=state_dict_saver.AsyncCallsQueue(),
            sharded_strategy=object(),
            wait_error_handling=False,
            force_check_all_plans=False,
            s3_region=None,
            s3client_config=object(),
        )
        state_dict_saver.maybe_finalize_async_calls(process_group=model.process_group)
    warned = [r.getMessage() for r in caplog.records if r.getMessage().endswith("effect here")]
    names = ("planner", "queue", "sharded_strategy", "s3client_config")
    assert sorted(warned) == sorted(
        f"{name} has no effect here" for name in (*names, "tsm.transform(device=)")
    )
