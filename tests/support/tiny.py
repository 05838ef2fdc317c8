"""Tiny real models and batches, and a training run in one process as the reference of sharding."""

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import nearlinear as nl

VOCABULARY, SEQUENCE = 97, 16


def gpt2(layers: int = 3) -> GPT2LMHeadModel:
    """Build a GPT-2 with tied embeddings and widths that are not divisible by 8 ranks."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=24,
            n_layer=layers,
            n_head=3,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def llama(layers: int = 3) -> LlamaForCausalLM:
    """Build a Llama with grouped-query attention and an untied head."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


MODELS = {"gpt2": gpt2, "llama": llama}


def rows(step: int, count: int) -> torch.Tensor:
    """Return ``count`` sequences of a step: LongTensor (count, SEQUENCE)."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCABULARY, (count, SEQUENCE), generator=generator)


def batch(ids: torch.Tensor) -> dict:
    return {"input_ids": ids, "labels": ids}


def optimizer_for(model, name: str) -> torch.optim.Optimizer:
    """Build an optimizer: SGD reveals a wrong gradient scale, AdamW exercises optimizer states."""
    if name == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.5)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def train_alone(kind: str, optimizer: str, count: int, steps: int = 2, clip: float = 1.0):
    """Return losses and final parameters of plain PyTorch, one large batch per step."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    updates, losses = optimizer_for(model, optimizer), []
    for step in range(steps):
        loss = model(**batch(rows(step, count))).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        updates.step()
        updates.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def train_sharded(
    rank: int,
    kind: str,
    degree: int,
    accumulation: int,
    optimizer: str,
    count: int,
    two_hop: bool = True,
    steps: int = 2,
    clip: float = 1.0,
    ranks_per_node: int | None = None,
    **config,
):
    """Run the same training through nearlinear, on this rank's share of every batch."""
    mesh = nl.init({"hybrid_shard_degree": degree, **config}, ranks_per_node=ranks_per_node)
    with nl.spmd.one_at_a_time(seed=0):
        model = MODELS[kind]()
    nl.shard(model)
    updates, losses = nl.shard_optimizer(optimizer_for(model, optimizer), model), []
    for step in range(steps):
        mine = rows(step, count).chunk(mesh.data_ranks)[mesh.data_rank(rank)]
        micro_batches = [batch(ids) for ids in mine.chunk(accumulation)]
        total = torch.zeros(1)
        for micro_batch in nl.accumulate(model, micro_batches, two_hop=two_hop):
            loss = model(**micro_batch).loss
            loss.backward()
            total += loss.detach() * len(micro_batch["input_ids"])
        nl.clip_grad_norm_(model, clip)
        updates.step()
        updates.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / count)
    with torch.no_grad():
        return losses, {name: p.full_tensor().clone() for name, p in model.named_parameters()}


def largest_difference(run, reference) -> float:
    """Over all losses and parameters of two runs."""
    losses = max(abs(a - b) for a, b in zip(run[0], reference[0], strict=True))
    parameters = max(
        (run[1][name] - value).abs().max().item() for name, value in reference[1].items()
    )
    return max(losses, parameters)


class Fails(torch.autograd.Function):
    """A copy; its backward pass raises."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("out of luck")
