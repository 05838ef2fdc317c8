"""torchtitan's models, losses and clipping with nearlinear's sharding, on CPU ranks."""

import dataclasses
import functools
import types

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor

import nearlinear as nl
from nearlinear.distributed.collectives import count_collectives
from tests.core.integrations.hosts import documented

REASON = "torchtitan is not installed: pip install torchtitan triton"
llama3 = pytest.importorskip("torchtitan.models.llama3", reason=REASON)
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import parallel_dims  # noqa: E402
from torchtitan.distributed import utils as titan  # noqa: E402
from torchtitan.models.common import ScaledDotProductAttention  # noqa: E402

STEPS, ROWS, TOKENS, WORLD = 20, 8, 32, 4
BACKEND = "partial_dtensor"


def small_model():
    """Return torchtitan's debug model with two blocks, and attention that CPUs have, on meta."""
    config = llama3._debugmodel("flex")
    attention = ScaledDotProductAttention.Config()
    layers = [
        dataclasses.replace(
            layer, attention=dataclasses.replace(layer.attention, inner_attention=attention)
        )
        for layer in config.layers[:2]
    ]
    config = dataclasses.replace(config, layers=layers)
    with torch.device("meta"):
        return config.build()


@functools.cache
def weights():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = small_model()
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        return dict(model.named_parameters())


def prepared(parallelize, replicas=2, **changes):
    """Return a model as torchtitan's trainer prepares it."""
    dims = parallel_dims.ParallelDims(
        dp_replicate=replicas, dp_shard=dist.get_world_size() // replicas, cp=1, tp=1, pp=1, ep=1,
        world_size=dist.get_world_size(), spmd_backend=BACKEND,
    )  # fmt: skip
    training = TrainingConfig(
        local_batch_size=1, global_batch_size=ROWS, mixed_precision_param="float32"
    )
    model = parallelize(
        small_model(),
        parallel_dims=dims,
        training=dataclasses.replace(training, **changes),
        parallelism=ParallelismConfig(spmd_backend=BACKEND),
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other for torchtitan
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        for name, parameter in model.named_parameters():
            whole = weights()[name]
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
    model.train()
    return model


def build_loss(model, chunked):
    config = CrossEntropyLoss.Config(global_vocab_size=2048)
    if chunked:
        config = ChunkedLossWrapper.Config(loss_fn=config, num_chunks=4)
    loss = config.build(compile_config=CompileConfig())
    if chunked:
        loss.set_lm_head(model.lm_head)
    model._skip_lm_head = chunked
    return loss


def train(model, steps, optimizer=None, first=0, chunked=False):
    """Run the calls of torchtitan's ``Trainer.train_step``; rows have uneven targets."""
    loss_function = build_loss(model, chunked)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank, losses = dist.get_rank(), []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(0, 2048, (ROWS, TOKENS + 1), generator=generator)
        labels = rows[:, 1:].clone()
        for row in range(ROWS):
            labels[row, : 2 * row] = -100
        tokens = (labels != -100).sum()
        total = torch.zeros(())
        for row in range(rank, ROWS, WORLD):
            loss, _ = loss_function(model(rows[row : row + 1, :-1]), labels[row : row + 1], tokens)
            loss.backward()
            total += loss.detach()
        titan.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses, optimizer


def work(rank, folder):
    from nearlinear.integrations.torchtitan import parallelize

    parallel_dims.device_type = titan.device_type = "cpu"  # it assumes GPUs where torch finds none
    result = {"alone": train(prepared(llama3.parallelize_llama), STEPS)[0]}
    for name, parallel in (("chunked alone", llama3.parallelize_llama), ("chunked", parallelize)):
        result[name] = train(prepared(parallel), 5, chunked=True)[0]
    model = prepared(parallelize)
    result["sharded"], optimizer = train(model, STEPS)
    nl.save(folder, model, optimizer, step=STEPS, wait=True)
    result["next"] = train(model, 2, optimizer, STEPS)[0]
    again = prepared(parallelize, replicas=1)  # another layout
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-3)
    assert nl.load(folder, again, optimizer) == STEPS
    result["resumed"] = train(again, 2, optimizer, STEPS)[0]
    result["all-reduces"] = []
    for parallel in (parallelize, llama3.parallelize_llama):
        model = prepared(parallel)
        with count_collectives() as counts:
            train(model, 1)
        result["all-reduces"].append(counts.calls["all_reduce"])
    result["refused"] = refusals(parallelize)
    return result


def refusals(parallelize):
    found = {}
    for name, changes in {
        "dtype": {"dtype": "bfloat16"},
        "offload": {"enable_cpu_offload": True},
    }.items():
        with pytest.raises(nl.errors.ConfigError) as caught:
            prepared(parallelize, **changes)
        found[name] = str(caught.value)
    with pytest.raises(nl.errors.ConfigError) as caught:
        prepared(parallelize, replicas=dist.get_world_size())
    found["degree"] = str(caught.value)
    dims = types.SimpleNamespace(tp=2, cp=1, pp=1, ep=1)
    with pytest.raises(nl.errors.ConfigError) as caught:
        parallelize(None, parallel_dims=dims, training=None, parallelism=None,
                    compile_config=None, ac_config=None, dump_folder="")  # fmt: skip
    found["layout"] = str(caught.value)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchtitan") / "checkpoint"
    return nl.spmd.run(work, WORLD, args=(folder,), processes=True)[0]


def test_losses_equal_those_of_the_host_alone(found):
    assert len(found["alone"]) == STEPS and found["alone"][-1] < found["alone"][0]
    torch.testing.assert_close(found["sharded"], found["alone"], atol=1e-5, rtol=0)


def test_losses_in_chunks_equal_those_of_the_host_alone(found):
    torch.testing.assert_close(found["chunked"], found["chunked alone"], atol=1e-5, rtol=0)
    torch.testing.assert_close(found["chunked"], found["alone"][:5], atol=1e-5, rtol=0)


def test_run_resumes_on_another_layout(found):
    torch.testing.assert_close(found["resumed"], found["next"], atol=1e-5, rtol=0)


def test_replicas_synchronize_once_per_step(found):
    units, micro_batches, losses = 4, ROWS // WORLD, 1
    assert found["all-reduces"] == [units + losses, units * micro_batches + losses]


def test_unsupported_settings_are_refused(found):
    reasons = found["refused"]
    assert "training.dtype = 'bfloat16'" in reasons["dtype"]
    assert "enable_cpu_offload" in reasons["offload"]
    assert "data_parallel_shard_degree = 1" in reasons["degree"]
    assert "tp = 2 with nearlinear inside torchtitan" in reasons["layout"]


def test_documented_config_uses_nearlinear():
    from nearlinear.integrations.torchtitan import parallelize

    configs = []
    for script in documented("torchtitan"):
        variables = {}
        exec(script, variables)
        configs.append(variables["our_llama3_8b"]())
    assert [config.model_spec.parallelize_fn is parallelize for config in configs] == [False, True]
    assert [config.parallelism.spmd_backend for config in configs] == ["spmd_types", BACKEND]
