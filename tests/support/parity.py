"""Unmodified Hugging Face models as references, and runs in any layout that must equal them."""

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

import nearlinear as nl
from nearlinear.checkpoint.shards import TensorShard, local_tensor_shards
from nearlinear.distributed import runtime
from nearlinear.fsdp.model_state import optimizer_parameter, parameter_state

VOCABULARY, SEQUENCE, ROWS = 97, 16, 8
STEPS = 2  # the second depends on the first update of all values and states

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
    """Return the config change for ``count`` layers, e.g. for the stages of a pipeline."""
    return {"n_layer" if "n_layer" in FAMILIES[family][1] else "num_hidden_layers": count}


def build(family: str, **changes) -> torch.nn.Module:
    """Build a model of ``family`` with the values of seed 0."""
    torch.manual_seed(0)
    return unseeded(family, **changes)


def unseeded(family: str, **changes) -> torch.nn.Module:
    name, arguments = FAMILIES[family]
    config = getattr(transformers, name)(**arguments | changes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def rows(step: int, count: int = ROWS, tokens: int = SEQUENCE) -> dict[str, torch.Tensor]:
    """Return ``count`` sequences of a step, with a different number of ignored labels in each."""
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
    """Return AdamW with an eps that damps noise.

    The gradient of a key's bias consists of rounding errors, which AdamW would normalize.
    """
    return torch.optim.AdamW(model.parameters(), lr=rate, eps=1e-5, fused=True)


class Run:
    """Result of a run: losses, gradients and norm of the first step, final values."""

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
    """Train with plain PyTorch in one process, one large batch per step, and AdamW."""
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
    """Run the same training through nearlinear on this rank.

    ``prepare(model)`` is called before sharding, ``then(model)`` after it.
    """
    mesh, run, device = nl.init(config), Run(), runtime.current().device
    with nl.spmd.one_at_a_time(seed=0):
        model = build(family, **changes)
    model = nl.transform(model)
    prepare(model)
    model = nl.shard(nl.pipeline(model) if mesh.pipeline > 1 else model)
    then(model)
    updates = nl.shard_optimizer(adamw(model, rate), model)
    for step in range(steps):
        batch = {key: value.to(device) for key, value in rows(step, tokens=tokens).items()}
        mine = split(batch, mesh.data_ranks)[mesh.data_rank(rank)]
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        for batch in nl.accumulate(model, split(mine, accumulation)):
            loss = forward_and_backward(model, batch)
            targets = int((batch["labels"][:, 1:] != -100).sum())
            totals += totals.new_tensor([loss.item() * targets, targets])
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
    """Run forward and backward and return the loss."""
    if runtime.current_mesh().pipeline > 1:
        return model.step(batch)
    loss = model(**batch).loss
    loss.backward()
    return loss


def whole(model, of) -> dict[str, torch.Tensor]:
    """Return ``of(parameter)`` of every parameter, gathered from all ranks that hold a part."""
    return {
        name: gathered(of(p), parameter_state(p).splits) for name, p in model.named_parameters()
    }


def gradient(parameter) -> torch.Tensor:
    """Return this rank's gradient of the parameter or of the optimizer's slice of it."""
    return optimizer_parameter(parameter).grad


def gathered(value: torch.Tensor, cuts) -> torch.Tensor:
    value = assembled(value) if isinstance(value, DTensor) else value
    for cut in cuts:
        shape = list(value.shape)
        shape[cut.dim] = cut.size
        everything, lies = value.new_zeros(shape), 0
        for first, count in cut.ranges:
            everything.narrow(cut.dim, first, count).copy_(value.narrow(cut.dim, lies, count))
            lies += count
        dist.all_reduce(everything, group=runtime.current().group(cut.axis))
        value = everything
    return value.to("cpu", copy=True)


def assembled(value: DTensor) -> torch.Tensor:
    """Assemble a DTensor; unlike full_tensor, also if two mesh dims shard one dim unevenly."""
    whole = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    for piece, block in local_tensor_shards(value).items():
        whole[piece.slices_in(TensorShard.full(whole.shape))] = block
    for dim, place in enumerate(value.placements):
        if place.is_shard():
            dist.all_reduce(whole, group=value.device_mesh.get_group(dim))
    return whole


def differences(found: Run, reference: Run) -> dict[str, float]:
    """Return the largest differences of losses, gradients, gradient norm and values."""

    def largest(one, other):
        assert one.keys() <= other.keys()  # a pipeline rank has its own stages only
        return max((one[name].float() - other[name].float()).abs().max().item() for name in one)

    losses = max(abs(a - b) for a, b in zip(found.losses, reference.losses, strict=True))
    return {
        "losses": losses,
        "gradients": largest(found.gradients, reference.gradients),
        "norm": abs(found.norm - reference.norm),
        "values": largest(found.values, reference.values),
    }


def assert_equal(found: list[Run], reference: Run, bound: float = 1e-5) -> None:
    """Assert that all ranks' runs equal the reference and together cover it."""
    for run in found:
        for name, difference in differences(run, reference).items():
            assert difference <= bound, f"{name} differ by {difference:g}"
    for kind in ("gradients", "values"):
        assert set().union(*(getattr(run, kind) for run in found)) == set(getattr(reference, kind))
