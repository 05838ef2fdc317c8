"""Tiny mixtures of experts, trained in one process and with expert parallelism."""

import functools

import torch
import torch.distributed as dist

import nearlinear as nl
from tests.support import parity, tiny

SHAPE = dict(
    vocab_size=tiny.VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts_per_tok=2,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=0,
)


def mixtral(experts: int = 4, **changes):
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = SHAPE | dict(num_local_experts=experts, intermediate_size=24, head_dim=8)
    return MixtralForCausalLM(MixtralConfig(**shape | changes))


def qwen3_moe(experts: int = 4, **changes):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = SHAPE | dict(
        num_experts=experts, moe_intermediate_size=24, intermediate_size=40, head_dim=8
    )
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape | changes))


def gpt_oss(experts: int = 4, **changes):
    """Build a model whose experts have biases and transposed weights."""
    from transformers import GptOssConfig, GptOssForCausalLM

    shape = SHAPE | dict(num_local_experts=experts, intermediate_size=24, head_dim=8)
    return GptOssForCausalLM(GptOssConfig(**shape | changes))


KINDS = {"mixtral": mixtral, "qwen3_moe": qwen3_moe, "gpt_oss": gpt_oss}


def build(kind, experts, seed=0, implementation=None, checkpointing=False, **changes):
    """Build a model of `KINDS` with an expert implementation and changes of its config."""
    torch.manual_seed(seed)
    model = KINDS[kind](experts, **changes)
    if implementation is not None:
        model.set_experts_implementation(implementation)
    if checkpointing:
        older = model.gradient_checkpointing_enable
        enable = getattr(model, "activation_checkpointing_enable", older)
        enable({"use_reentrant": False})
    return model.train()


def transformed(kind: str, experts: int, config, **changes):
    """Build the same model on every rank and divide its experts. Requires `nl.init`."""
    with nl.spmd.one_at_a_time(seed=0):
        model = build(kind, experts, **changes)
    return nl.transform(model, config)


@functools.cache
def train_alone(kind: str, experts: int, count: int, steps: int = 2, **changes):
    """Return losses, gradients of the first step and final parameters of the unmodified model."""
    model = build(kind, experts, **changes)
    updates, losses, gradients = tiny.optimizer_for(model, "adamw"), [], {}
    for step in range(steps):
        loss = model(**tiny.batch(tiny.rows(step, count))).loss
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        updates.step()
        updates.zero_grad()
        losses.append(loss.item())
    return losses, gradients, {name: p.detach() for name, p in model.named_parameters()}


def train_divided(
    rank: int,
    kind: str,
    experts: int,
    config: dict,
    count: int,
    accumulation: int = 1,
    moe: dict | None = None,
    steps: int = 2,
    two_hop: bool = True,
    precision: str | None = None,
    **changes,
):
    """Run the same training with divided experts, on this rank's share of every batch."""
    config = dict(config)
    mesh = nl.init(config, ranks_per_node=config.pop("ranks_per_node", None))
    model = nl.shard(transformed(kind, experts, moe, **changes), precision=precision)
    updates = nl.shard_optimizer(tiny.optimizer_for(model, "adamw"), model)
    losses, gradients = [], {}
    for step in range(steps):
        mine = tiny.rows(step, count).chunk(mesh.data_ranks)[mesh.data_rank(rank)]
        total = torch.zeros(1)
        micro_batches = [tiny.batch(ids) for ids in uneven(mine, accumulation)]
        for batch in nl.accumulate(model, micro_batches, two_hop=two_hop):
            loss = model(**batch).loss
            loss.backward()
            total += loss.detach() * len(batch["input_ids"])
        if step == 0:
            gradients = parity.whole(model, parity.gradient)
        updates.step()
        updates.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() * mesh.data_ranks / mesh.world / count)
    return losses, gradients, parity.whole(model, lambda parameter: parameter.detach())


def uneven(rows: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Split ``rows`` into ``parts`` micro-batches of which the first is the largest."""
    smaller = len(rows) // (parts + 1) if parts > 1 else 0
    return list(rows.split([len(rows) - smaller * (parts - 1), *[smaller] * (parts - 1)]))


def largest_difference(run, reference) -> float:
    """Return the largest difference of losses, gradients and parameters of two runs."""
    found = [abs(a - b) for a, b in zip(run[0], reference[0], strict=True)]
    for mine, theirs in zip(run[1:], reference[1:], strict=True):
        assert mine.keys() == theirs.keys()
        found += [(mine[name] - value).abs().max().item() for name, value in theirs.items()]
    return max(found)
