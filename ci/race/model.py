"""What everybody trains: the same GPT-2 from the same numbers, on the same tokens."""

from __future__ import annotations

import torch

from .plan import Plan


def build(plan: Plan) -> torch.nn.Module:
    """GPT-2 with tied embeddings and without dropout, in float32, equal on every rank."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=plan.vocabulary,
        n_positions=plan.sequence,
        n_embd=plan.width,
        n_layer=plan.layers,
        n_head=plan.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20260101)
        return GPT2LMHeadModel(config)


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    return list(model.transformer.h)


def optimizer(parameters, plan: Plan) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=plan.learning_rate, foreach=True)


def batches(plan: Plan, step: int, rank: int) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of one rank's step, tokens (B, S): easy to learn, so that losses fall."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = (plan.accumulation, plan.micro_batch, plan.sequence)
    tokens = torch.randint(0, plan.vocabulary, shape, generator=generator)
    tokens = (tokens.double() ** 2 / plan.vocabulary).long()  # frequent ones and rare ones
    return [{"input_ids": ids, "labels": ids} for ids in tokens]
