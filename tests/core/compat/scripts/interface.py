"""Functions of SMP v1 apart from a training run, each used as its documentation shows."""

import argparse

import smdistributed.modelparallel.torch as smp
import torch
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_state_dict_to_hf_gpt2,
)
from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint, checkpoint_sequential
from transformers import AutoModelForCausalLM, GPT2Config

VOCABULARY, TOKENS = 32, 8


def ranks(strategy):
    """Return the ranks and groups of one rank."""
    assert not smp.is_initialized()
    smp.init({
        "partitions": 2,
        "tensor_parallel_degree": 2,
        "ddp": True,
        "placement_strategy": strategy,
    })  # fmt: skip
    assert smp.is_initialized() and not smp.is_tracing()
    assert smp.local_rank() < smp.local_size() <= smp.size()
    assert smp.mp_size() * smp.rdp_size() == smp.size()
    assert smp.pp_size() * smp.dp_size() == smp.size()
    assert smp.pp_size() * smp.tp_size() * smp.rdp_size() == smp.size()
    for group, rank, process_group in (
        (smp.get_tp_group(), smp.tp_rank(), smp.get_tp_process_group()),
        (smp.get_pp_group(), smp.pp_rank(), smp.get_pp_process_group()),
        (smp.get_rdp_group(), smp.rdp_rank(), smp.get_rdp_process_group()),
        (smp.get_mp_group(), smp.mp_rank(), smp.get_mp_process_group()),
        (smp.get_dp_group(), smp.dp_rank(), smp.get_dp_process_group()),
        (list(range(smp.size())), smp.rank(), smp.get_world_process_group()),
    ):
        assert group[rank] == smp.rank()
        total = torch.tensor([smp.rank()])
        torch.distributed.all_reduce(total, group=process_group)
        assert total.item() == sum(group)
    return smp.rank(), smp.pp_rank(), smp.tp_rank(), smp.rdp_rank(), smp.mp_rank(), smp.dp_rank()


def messages():
    """Exchange objects in the groups of `ranks`."""
    smp.init({"partitions": 2, "tensor_parallel_degree": 2, "ddp": True})
    smp.barrier()
    smp.barrier(smp.CommGroup.TP_GROUP)
    smp.dp_barrier()
    smp.mp_barrier()
    value = {"rank": smp.rank(), "tensor": torch.full((2,), smp.rank()), "list": [1.5, None, "a"]}
    for group, mine in (
        (smp.WORLD, range(smp.size())),
        (smp.MP_GROUP, smp.get_mp_group()),
        (smp.DP_GROUP, smp.get_dp_group()),
        (smp.TP_GROUP, smp.get_tp_group()),
        (smp.PP_GROUP, smp.get_pp_group()),
        (smp.RDP_GROUP, smp.get_rdp_group()),
    ):
        found = smp.allgather(value, group)
        assert [each["rank"] for each in found] == list(mine)
        assert all(each["tensor"].tolist() == [each["rank"]] * 2 for each in found)
        assert all(each["list"] == [1.5, None, "a"] for each in found)
    if smp.rank() == 0:
        smp.broadcast(value, smp.CommGroup.WORLD)
    else:
        assert smp.recv_from(0, smp.RankType.WORLD_RANK)["rank"] == 0
    for kind, rank, group in (
        (smp.WORLD_RANK, smp.rank(), list(range(smp.size()))),
        (smp.MP_RANK, smp.mp_rank(), smp.get_mp_group()),
        (smp.DP_RANK, smp.dp_rank(), smp.get_dp_group()),
        (smp.TP_RANK, smp.tp_rank(), smp.get_tp_group()),
        (smp.PP_RANK, smp.pp_rank(), smp.get_pp_group()),
        (smp.RDP_RANK, smp.rdp_rank(), smp.get_rdp_group()),
    ):
        if rank == 0:
            smp.send((smp.rank(), "hello"), len(group) - 1, kind)
        elif rank == len(group) - 1:
            assert smp.recv_from(0, kind) == (group[0], "hello")


def config():
    return GPT2Config(
        n_layer=4, n_head=2, n_embd=16, n_positions=TOKENS, vocab_size=VOCABULARY,
        bos_token_id=None, eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def create_model(**options):
    torch.manual_seed(3)
    with smp.model_creation(**options):
        return AutoModelForCausalLM.from_config(config())


def ids(step=0, rows=4):
    return torch.randint(VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(step))


class Rows:
    """A batch that splits itself."""

    def __init__(self, rows):
        self.rows = rows

    def smp_slice(self, num_mb, mb, axis):
        return Rows(self.rows.chunk(num_mb, axis)[mb])


@smp.step(non_split_inputs=["half"], input_split_axes={"columns": 1}, detach_outputs=True)
def step_with_options(model, columns, half, rows=None):
    loss = model(input_ids=columns.t(), labels=rows.rows)["loss"]
    model.backward([loss], [half * 2])
    return {"loss": loss, "logits": torch.ones(2)}


def step_outputs():
    """Return a loss by each reduction of `StepOutput`."""
    smp.init({"microbatches": 2, "ddp": True})
    model = smp.DistributedModel(create_model())
    found = step_with_options(model, ids().t().contiguous(), torch.tensor(0.5), rows=Rows(ids()))
    loss = found["loss"]
    assert isinstance(loss, smp.StepOutput) and len(loss.outputs) == 2
    assert found["logits"].concat().shape == (4,) and found["logits"].stack().shape == (2, 2)
    assert loss.reduce_sum().item() == 2 * loss.reduce_mean().item()
    assert loss.detach().outputs[0].item() == loss.outputs[0].item()
    return loss.reduce_mean().item(), {n: p.grad for n, p in model.named_parameters()}


@smp.step
def train_step(model, rows):
    loss = model(input_ids=rows, labels=rows)["loss"]
    model.backward(loss)
    return loss


def model_state(settings, folder):
    """Use the parts of model and optimizer on any layout; return names and whole values."""
    smp.init({"ddp": True, "microbatches": 2, **settings})
    calls = []
    model = smp.DistributedModel(
        create_model(), trace_device="cpu", trace_execution_times=True, bucket_cap_mb=50,
        overlapping_allreduce=False, trace_memory_usage=True, broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )  # fmt: skip
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    model.register_post_partition_hook(lambda m, o: calls.append(("partition", m, o)))
    model.register_post_step_hook(lambda m, o: calls.append(("step", m, o)))
    assert not model.partitioned and model.module is model.get_module()
    train_step(model, ids())
    assert model.partitioned
    assert calls == [("partition", model, optimizer), ("step", model, optimizer)]
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        len(group) for group in optimizer.fp16_groups
    ]
    assert not optimizer.overflow and optimizer.optimizer.param_groups is optimizer.param_groups
    optimizer.zero_grad(set_to_none=True)
    assert optimizer.defaults["lr"] == 1e-2 and optimizer.state is optimizer.optimizer.state
    names = [name for name, _ in model.local_named_parameters()]
    assert len(names) == len(list(model.local_parameters()))
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in model.local_named_buffers()]
    assert len(list(model.local_named_buffers())) == len(list(model.local_buffers()))
    assert len(list(model.local_named_modules())) == len(list(model.local_modules()))
    divided = [name for name, p in model.named_parameters() if model.is_distributed_parameter(p)]
    assert divided == [name for name, _ in model.scaled_batch_reducer_named_parameters()]
    assert all(model.is_scaled_batch_parameter(model.module.get_parameter(n)) for n in divided[:0])
    whole = [name for name, _ in model.default_reducer_named_parameters()]
    assert sorted(divided + whole) == sorted(names)
    assert bool(list(model.distributed_modules())) == bool(divided) == (smp.tp_size() > 1)
    assert not any(model.is_distributed_buffer(b) or model.is_scaled_batch_buffer(b)
                   for b in model.local_buffers())  # fmt: skip
    state = model.state_dict()
    only_first = model.state_dict(gather_to_rank0=True)
    assert bool(only_first) == (smp.rank() == 0)
    updates = optimizer.state_dict()
    smp.save(
        {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()},
        folder / "state.pt",
        partial=True,
    )
    smp.save({"args": argparse.Namespace(a=1)}, folder / f"args_{smp.rank()}.pt", partial=False)
    after = train_step(model, ids(1)).reduce_mean().item()
    optimizer.step()
    optimizer.zero_grad()
    smp.barrier()
    found = smp.load(folder / "state.pt", partial=True)
    model.load_state_dict(found["model"], same_partition_load=True)
    optimizer.load_state_dict(found["optimizer"])
    assert smp.load(folder / f"args_{smp.rank()}.pt", partial=False)["args"].a == 1
    assert train_step(model, ids(1)).reduce_mean().item() == after
    optimizer.step()
    model.load_state_dict(state)
    optimizer.load_state_dict(updates)
    assert train_step(model, ids(1)).reduce_mean().item() == after and len(calls) == 2
    assert optimizer.local_state_dict(gather_if_shard=True).keys() == updates.keys()
    return names, state, updates


class Pair(torch.nn.Module):
    """Modules that `smp.partition` assigns, as they are created."""

    def __init__(self):
        super().__init__()
        with smp.partition(1):
            self.late = torch.nn.Linear(2, 2)
        self.early = torch.nn.Linear(2, 2)


def create_parts():
    """Use the contexts on modules of PyTorch."""
    Pair()
    with smp.tensor_parallelism(enabled=False):
        plain = torch.nn.Linear(2, 2)
    with smp.delay_param_initialization(enabled=True):
        late = torch.nn.Linear(2, 2)
    assert late.weight.is_meta and not plain.weight.is_meta


def preparation():
    """Use the functions for scripts before the first step."""
    smp.init({"partitions": 2, "auto_partition": False, "default_partition": 0, "microbatches": 2,
              "ddp": True})  # fmt: skip
    create_parts()
    model = create_model(tensor_parallelism=True, flash_attention=True, dtype=torch.bfloat16)
    smp.set_tensor_parallelism(model, True, fused_softmax=True)
    transformer = model.transformer
    assert isinstance(model, smp.nn.DistributedTransformerLMHead)
    assert isinstance(transformer, smp.nn.DistributedTransformer)
    layers = transformer.seq_layers
    assert layers is transformer.h
    for layer in layers:
        assert isinstance(layer, smp.nn.DistributedTransformerLayer)
        assert isinstance(layer.attention, smp.nn.DistributedAttentionLayer)
        assert isinstance(layer.output, smp.nn.DistributedTransformerOutputLayer)
    state = model.state_dict()
    there = translate_hf_state_dict_to_smdistributed_gpt2(state, max_seq_len=4)
    assert there["transformer.wpe.weight"].shape[0] == 4
    assert translate_hf_state_dict_to_smdistributed(state).keys() == state.keys()
    assert translate_state_dict_to_hf_gpt2(state).keys() == state.keys()
    for layer in list(layers)[1:]:
        smp.set_partition(layer, 1)
    smp.set_activation_checkpointing(transformer, strategy="contiguous")
    model = smp.DistributedModel(model)
    loss = train_step(model, ids()).reduce_mean().item()
    names = [name for name, _ in model.local_named_parameters()]
    return loss, [name for name in names if name.endswith("ln_1.weight")]


def parts():
    """Use the modules and functions that need no job of several ranks."""
    smp.init({"ddp": True})
    linear, table = smp.nn.DistributedLinear(2, 3), smp.nn.DistributedEmbedding(4, 2)
    norm = smp.nn.FusedLayerNorm(3)
    assert isinstance(torch.nn.LayerNorm(3), smp.nn.FusedLayerNorm)
    stack = torch.nn.Sequential(linear, norm, torch.nn.Linear(3, 1))
    x = table(torch.tensor([0, 1]))
    plain = stack(x).sum()
    for found in (
        checkpoint(stack, x, preserve_rng_state=True).sum(),
        checkpoint_sequential(stack, x, pack_args_as_tuple=True, strategy="group_2").sum(),
    ):
        assert found.item() == plain.item()
        found.backward(retain_graph=True)

    @smp.tp_register(torch.nn.Linear)
    class Mine(torch.nn.Linear):
        """A module with a distributed form."""

    smp.tp_register_with_module(Mine, torch.nn.Linear)
    return Mine(2, 2)


def scaled(init_scale):
    """Return losses, overflows and scales of steps with `smp.amp.GradScaler`."""
    smp.init({"ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0})
    model = smp.DistributedModel(create_model())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = smp.amp.GradScaler(init_scale=init_scale, growth_interval=1)

    @smp.step
    def scaled_step(model, rows):
        loss = model(input_ids=rows, labels=rows)["loss"]
        model.backward(scaler.scale(loss))
        return loss

    losses = []
    for _ in range(2):
        losses.append(scaled_step(model, ids()).reduce_mean().item())
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    other = smp.amp.GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert scaler.is_enabled() and other.get_scale() == scaler.get_scale()
    return losses, scaler.get_scale()


def overflowing():
    """Return whether a step overflowed, the loss scale, and whether parameters changed."""
    smp.init({"ddp": True, "fp16": True})
    model = smp.DistributedModel(create_model(dtype=torch.float16))
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**120, "scale_factor": 2.0**110},
    )
    found = []
    for _ in range(2):
        before = model.state_dict() if model.partitioned else None
        train_step(model, ids())
        optimizer.step()
        same = before is not None and torch.equal(
            before["lm_head.weight"], model.state_dict()["lm_head.weight"]
        )
        found.append((optimizer.overflow, optimizer.loss_scale, same))
        optimizer.zero_grad()
    return found
