"""Untouched Hugging Face models of every family, and runs that must equal theirs at any layout."""

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

import nearlinear as nl
from nearlinear import runtime
from nearlinear.checkpoint.pieces import Piece, blocks
from nearlinear.parallel import slices
from nearlinear.parallel.layout import cuts_of

VOCABULARY, SEQUENCE, ROWS, STEPS = 97, 16, 8, 3

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.1,
}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 8, "n_positions": 64} | _NO_DROPOUT
_SHARED = ("vocab_size", "bos_token_id", "eos_token_id", "initializer_range")

FAMILIES = {
    "gpt2": ("GPT2Config", {key: _COMMON[key] for key in _SHARED} | _GPT2),
    "gpt_neox": ("GPTNeoXConfig", _COMMON),
    "llama": ("LlamaConfig", _COMMON | {"num_key_value_heads": 4}),
    "llama_tied": ("LlamaConfig", _COMMON | {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", _COMMON | {"num_key_value_heads": 4, "sliding_window": 5}),
    "mixtral": ("MixtralConfig", _COMMON | {"num_key_value_heads": 4, "num_local_experts": 4}),
}


def layers(family: str, count: int) -> dict[str, int]:
    """What to change for ``count`` layers, where two are too few for the stages of a pipeline."""
    return {"n_layer" if "n_layer" in FAMILIES[family][1] else "num_hidden_layers": count}


def build(family: str, **changes) -> torch.nn.Module:
    """A model of ``family`` with the values of seed 0."""
    torch.manual_seed(0)
    return unseeded(family, **changes)


def unseeded(family: str, **changes) -> torch.nn.Module:
    name, arguments = FAMILIES[family]
    config = getattr(transformers, name)(**arguments | changes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def rows(step: int, count: int = ROWS, tokens: int = SEQUENCE) -> dict[str, torch.Tensor]:
    """``count`` sequences of a step; some labels do not count, of every sequence another number."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCABULARY, (count, tokens), generator=generator)
    labels = ids.clone()
    for row in range(count):
        labels[row, : (3 * row) % (tokens - 2)] = -100
    return {"input_ids": ids, "labels": labels}


def split(batch: dict, parts: int) -> list[dict]:
    pieces = zip(*(value.chunk(parts) for value in batch.values()), strict=True)
    return [dict(zip(batch, values, strict=True)) for values in pieces]


def adamw(model, rate: float) -> torch.optim.AdamW:
    """With an eps that keeps noise small: a key's bias has no gradient but rounding errors, which
    AdamW would otherwise make as large as any."""
    return torch.optim.AdamW(model.parameters(), lr=rate, eps=1e-5, fused=True)


class Run:
    """What two runs are compared by: losses, the first step's gradients and norm, last values."""

    def __init__(self):
        self.losses, self.gradients, self.norm, self.values = [], {}, 0.0, {}


def alone(
    family: str,
    tokens: int = SEQUENCE,
    dtype=None,
    rate: float = 1e-3,
    steps: int = STEPS,
    **changes,
) -> Run:
    """Plain PyTorch in one process, one big batch per step, AdamW."""
    run, model = Run(), build(family, **changes)
    updates = adamw(model, rate)
    for step in range(steps):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(**rows(step, tokens=tokens)).loss
        loss.backward()
        if step == 0:
            run.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            run.norm = torch.nn.utils.get_total_norm(list(run.gradients.values())).item()
        updates.step()
        updates.zero_grad()
        run.losses.append(loss.item())
    run.values = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


def together(
    rank: int,
    family: str,
    config: dict,
    accumulation: int = 1,
    tokens: int = SEQUENCE,
    delayed: bool = False,
    rate: float = 1e-3,
    steps: int = STEPS,
    prepare=lambda model: None,
    then=lambda model: None,
    **changes,
) -> Run:
    """The same on this rank of many, through nearlinear.

    ``prepare(model)`` before it is sharded, ``then(model)`` afterwards.
    """
    mesh, run = nl.init(config), Run()
    with nl.spmd.one_at_a_time(seed=0):
        model = build(family, **changes)
    model = nl.transform(model)
    prepare(model)
    model = nl.shard(nl.pipeline(model) if mesh.pipeline > 1 else model)
    then(model)
    updates = nl.shard_optimizer(adamw(model, rate), model)
    for step in range(steps):
        mine = split(rows(step, tokens=tokens), mesh.data_ranks)[mesh.data_rank(rank)]
        totals = torch.zeros(2, dtype=torch.float64)
        for batch in nl.accumulate(model, split(mine, accumulation)):
            loss = forward_and_backward(model, batch)
            targets = int((batch["labels"][:, 1:] != -100).sum())
            totals += torch.tensor([loss.item() * targets, targets])
        if step == 0:
            run.gradients = whole(model, gradient)
            run.norm = nl.clip_grad_norm_(model, float("inf"))
        updates.step()
        updates.zero_grad()
        dist.all_reduce(totals)
        run.losses.append((totals[0] / totals[1]).item())
    run.values = whole(model, lambda parameter: parameter.detach())
    return run


def forward_and_backward(model, batch: dict) -> torch.Tensor:
    """The loss of ``batch``, with its gradients under way."""
    if runtime.current_mesh().pipeline > 1:
        return model.step(batch)
    loss = model(**batch).loss
    loss.backward()
    return loss


def whole(model, of) -> dict[str, torch.Tensor]:
    """``of(parameter)`` for every parameter, gathered from all ranks that have a part of it."""
    return {name: gathered(of(p), cuts_of(p)) for name, p in model.named_parameters()}


def gradient(parameter) -> torch.Tensor:
    """This rank's part of it: of the parameter, or of the slice that the optimizer has of it."""
    return slices.of(parameter).grad


def gathered(value: torch.Tensor, cuts) -> torch.Tensor:
    value = assembled(value) if isinstance(value, DTensor) else value
    for cut in cuts:
        shape = list(value.shape)
        shape[cut.dim] = cut.size
        everything, lies = value.new_zeros(shape), 0
        for first, count in cut.mine:
            everything.narrow(cut.dim, first, count).copy_(value.narrow(cut.dim, lies, count))
            lies += count
        dist.all_reduce(everything, group=runtime.current().group(cut.axis))
        value = everything
    return value.clone()


def assembled(value: DTensor) -> torch.Tensor:
    """All of it, also where two mesh dims cut one dim unevenly: torch's full_tensor fails there."""
    whole = torch.zeros(value.shape, dtype=value.dtype)
    for piece, block in blocks(value).items():
        whole[piece.inside(Piece.whole(whole.shape))] = block
    for dim, place in enumerate(value.placements):
        if place.is_shard():
            dist.all_reduce(whole, group=value.device_mesh.get_group(dim))
    return whole


def differences(found: Run, reference: Run) -> dict[str, float]:
    """The largest difference of losses, gradients (also of their norm) and values."""

    def largest(one, other):
        assert one.keys() <= other.keys()  # of a pipeline, those of its stages
        return max((one[name].float() - other[name].float()).abs().max().item() for name in one)

    losses = max(abs(a - b) for a, b in zip(found.losses, reference.losses, strict=True))
    return {
        "losses": losses,
        "gradients": largest(found.gradients, reference.gradients),
        "norm": abs(found.norm - reference.norm),
        "values": largest(found.values, reference.values),
    }


def assert_equal(found: list[Run], reference: Run, bound: float = 1e-5) -> None:
    """All ranks' runs are the reference, and nothing of it is missing."""
    for run in found:
        for what, difference in differences(run, reference).items():
            assert difference <= bound, f"{what} differ by {difference:g}"
    for kind in ("gradients", "values"):
        assert set().union(*(getattr(run, kind) for run in found)) == set(getattr(reference, kind))
