# %% [markdown]
# # Fit more: a ladder of techniques, and what each rung costs
#
# After this notebook you can say which part of a training step's memory each technique makes
# smaller, climb the ladder in the order in which it pays, and read a memory report to see which
# rung is next. One GPT-2 stands on every rung; its losses stay the same on all of them.
#
# Everything runs here: eight ranks are threads of this machine, sharding, recomputation, copies to
# and from host memory and collectives are real. Bytes, operations and messages are counted, so they
# are those of eight GPUs; times are not, so there are none.

# %% tags=["parameters"]
scale = "ci"  # ci: a minute on 2 cores; laptop: a wider model and longer sequences

# %%
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry
from transformers import GPT2Config, GPT2LMHeadModel, logging

import nearlinear as nl
from nearlinear import plots
from nearlinear._torch import TorchDispatchMode

assert scale in ("ci", "laptop", "cluster"), f"scale = {scale!r}: use ci, laptop or cluster"
logging.set_verbosity_error()  # of transformers

# %% [markdown]
# ## What there is to make smaller
#
# With AdamW a parameter takes 16 bytes on a rank that has all of it: 4 for itself, 4 for its
# gradient, 8 for the optimizer's two averages. Beside these *model states* there are *activations*,
# which grow with the batch, the sequence and the layers, and what is *gathered* while a block
# computes. `nl.memory_report` measures one step:

# %%
WIDTH, LAYERS, LENGTH, ROWS, STEPS = 64, 4, 32, 16, 2
if scale != "ci":
    WIDTH, LAYERS, LENGTH = 256, 8, 256


def gpt2() -> GPT2LMHeadModel:
    shape = {"vocab_size": 512, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**shape, **dropout, n_head=8, use_cache=False))


def tokens(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 512, (ROWS, LENGTH), generator=generator)


class Operations(TorchDispatchMode):
    """Counts those of matrix products, as PyTorch's `FlopCounterMode` does, in all modules alike.

    Attention's kernel on the CPU is not among them, here as there.
    """

    giga = 0.0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        output = operator(*args, **(kwargs or {}))
        count = flop_registry.get(operator.overloadpacket)
        if count is not None:
            self.giga += count(*args, **(kwargs or {}), out_val=output) / 1e9
        return output


@dataclass
class Rung:
    """A technique on top of those before it."""

    name: str
    config: dict
    checkpoint: str | None = None
    offload: int | None = None


def train(rank: int, rung: Rung) -> dict:
    """What the rung takes on this rank in the last step, and the losses of all."""
    mesh = nl.init(rung.config)
    with nl.delayed_init(seed=0):
        model = gpt2()
    model = nl.transform(model)
    model = nl.shard(nl.pipeline(model) if mesh.pipeline > 1 else model)
    if rung.checkpoint:
        nl.checkpoint_activations(model, rung.checkpoint)
    if rung.offload:
        nl.offload_activations(model, rung.offload, smallest=1)
    optimizer = nl.shard_optimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, fused=True), model
    )
    losses = []

    def one_step(step: int) -> None:
        ids = tokens(step).chunk(mesh.data_ranks)[mesh.data_rank(rank)]
        total = torch.zeros(1)
        for batch in nl.accumulate(model, [{"input_ids": ids, "labels": ids}]):
            if mesh.pipeline > 1:
                loss = model.step(batch)
            else:
                loss = model(**batch).loss
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / mesh.world)

    for step in range(STEPS - 1):
        one_step(step)
    with nl.memory_report(model, optimizer) as memory, nl.count_collectives() as counts:
        with Operations() as operations:
            one_step(STEPS - 1)
    parts = memory.report.mine
    return {
        "losses": losses,
        "parts": {key: parts[key] / 2**20 for key in SHOWN},
        "flops": operations.giga,
        "sent": sum(counts.bytes.values()) / 2**20,
        "report": str(memory),
    }


SHOWN = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "gathered": "gathered parameters",
    "activations": "activations",
}

plain = Rung("data parallel", {"hybrid_shard_degree": 1})
first = nl.spmd.run(train, 8, args=(plain,))
print(first[0]["report"])

# %% [markdown]
# The lower half of the table is where to look next: what each knob, turned alone, would save here.
#
# ## The ladder
#
# AWS's page of best practices for its model parallel library gives an order: shard the optimizer's
# state, recompute activations, then tensor parallelism within a node, pipeline parallelism across
# nodes, and activations in host memory last. Behind the first stands what sharded data parallelism
# added to it later: parameters and gradients are sharded too, among ranks that are near each other.
# Every rung keeps those before it. The global batch stays the same: 16 sequences.

# %%
SHARED = plain.config | {"shard_optimizer_state": True}
MICS = SHARED | {"hybrid_shard_degree": 2, "sdp_max_live_parameters": 0}
TENSOR = MICS | {"tensor_parallel_degree": 2}
PIPELINE = TENSOR | {"pipeline_parallel_degree": 2, "microbatches": 4}
PIPELINE |= {"shard_optimizer_state": False}  # one replica is left, whose shards are all there is

ladder = [
    plain,
    Rung("+ optimizer states over replicas", SHARED),
    Rung("+ states sharded in pairs", MICS),
    Rung("+ all but products recomputed", MICS, "selective"),
    Rung("+ every block recomputed", MICS, "each"),
    Rung("+ tensor parallel 2", TENSOR, "each"),
    Rung("+ pipeline 2", PIPELINE, "each"),
    Rung("+ offload, horizon 1", PIPELINE, "each", 1),
]
found = [first, *(nl.spmd.run(train, 8, args=(rung,)) for rung in ladder[1:])]
most = [  # of any rank; a pipeline's are not alike
    {part: max(of_rank["parts"][part] for of_rank in of_rung) for part in SHOWN}
    for of_rung in found
]
total = [sum(parts.values()) for parts in most]
work = [sum(of_rank["flops"] for of_rank in of_rung) for of_rung in found]
sent = [max(of_rank["sent"] for of_rank in of_rung) for of_rung in found]
print(f"{'':34}{'MiB':>8}{'GFLOP':>9}{'MiB sent':>10}{'last loss':>12}")
for rung, size, operations, volume, of_rung in zip(ladder, total, work, sent, found, strict=True):
    loss = of_rung[0]["losses"][-1]
    print(f"{rung.name:34}{size:8.2f}{operations:9.2f}{volume:10.2f}{loss:12.6f}")

# %%
fig, (left, right) = plt.subplots(
    1, 2, figsize=(11, 4), layout="constrained", sharey=True, width_ratios=[3, 2]
)
places = range(len(ladder))
begin = [0.0] * len(ladder)
for colour, (part, name) in zip(plots.PALETTE, SHOWN.items(), strict=False):
    sizes = [parts[part] for parts in most]
    left.barh(places, sizes, left=begin, color=colour, label=name)
    begin = [a + b for a, b in zip(begin, sizes, strict=True)]
left.set_yticks(places, [rung.name for rung in ladder])
left.invert_yaxis()
left.set_xlabel("MiB of one rank, the most of any")
left.legend(frameon=False)
for offset, values, label in ((-0.2, work, "operations"), (0.2, sent, "bytes in collectives")):
    right.barh([place + offset for place in places], [value / values[0] for value in values], 0.4,
               color=plots.PALETTE[5 + (offset > 0)], label=label)  # fmt: skip
right.set_xlabel("of a step, times the first rung's")
right.legend(frameon=False)
for ax in (left, right):
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# What to read off it:
#
# - Sharding the optimizer's state divides gradients and averages by all eight ranks; the one
#   all-reduce becomes a reduce-scatter and a gather, which is what an all-reduce is made of.
#   (Collectives are counted by their larger side, so that the two count twice.)
# - Sharding the parameters in pairs halves them, and what is gathered is a block, not the model.
# - Keeping only what matrix products and attention put out takes nearly half of the activations
#   away and computes no product twice. Recomputing all costs one more forward pass of the blocks:
#   what is left is one input per block, and one block's activations while it is computed again.
# - Tensor and pipeline parallelism divide the states again, and let more of the batch onto a rank.
# - Offloading takes the inputs away too, but for those of two blocks; with few layers that is
#   little beside the block that is computed again. It costs neither operations nor messages: copies
#   go beside the computation.

# %%
(dp, over_replicas, mics, selective, again, tensor, pipeline, offload) = most
assert all(
    abs(a - b) < 1e-5
    for of_rung in found
    for of_rank in of_rung
    for a, b in zip(of_rank["losses"], found[0][0]["losses"], strict=True)
)
for part in ("optimizer", "gradients"):
    assert over_replicas[part] < 1.01 * dp[part] / 8  # AdamW also counts its steps
assert over_replicas["parameters"] == dp["parameters"] == 2 * mics["parameters"]
assert mics["gathered"] < dp["gathered"] / 2
assert again["activations"] < 0.6 * selective["activations"] < 0.36 * mics["activations"]
assert again["activations"] > mics["activations"] / LAYERS  # a block's, and inputs
assert work[0] == work[2] == work[3] and 1.1 < work[4] / work[2] < 4 / 3 + 0.01
assert sent[4] == sent[3] == sent[2]
assert tensor["parameters"] < 0.52 * again["parameters"]  # norms are on both tensor ranks
assert offload["activations"] < pipeline["activations"]
assert work[7] == work[6] and sent[7] == sent[6]
assert total[-1] < total[0] / 5

# %% [markdown]
# ## How blocks are recomputed
#
# `nl.checkpoint_activations(model, strategy)`: every block by itself keeps one input per block. In
# groups there are fewer inputs, but a whole group's activations come back at once, and its
# parameters are gathered once more: `"group_N"` pays where inputs are what is left, in long
# models. `"selective"` keeps the outputs of matrix products and of attention and computes norms,
# activation functions and dropout again, which is nearly free. A budget such as `"4MiB"` recomputes
# as few blocks as fit what waits between the passes; the table has the most there is at once, with
# what is computed again.


# %%
def kept(rank: int, strategy: str | None) -> tuple[float, float]:
    """MiB of activations at their peak, and GFLOP of a step."""
    nl.init({})
    with nl.delayed_init(seed=0):
        model = gpt2()
    model = nl.shard(model)
    if strategy:
        nl.checkpoint_activations(model, strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = tokens(0)[:8]
    for _ in range(2):  # a budget is measured in the first step
        with nl.memory_report(model, optimizer) as memory, Operations() as operations:
            for batch in nl.accumulate(model, [{"input_ids": ids, "labels": ids}]):
                model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return memory.report.mine["activations"] / 2**20, operations.giga


strategies = [None, "4MiB", "selective", "each", "group_2", "contiguous"]
waiting = {strategy: nl.spmd.run(kept, 1, args=(strategy,))[0] for strategy in strategies}
for strategy, (size, operations) in waiting.items():
    print(f"{strategy or 'as it is':12}{size:8.2f} MiB{operations:9.2f} GFLOP")

sizes = {strategy: size for strategy, (size, _) in waiting.items()}
costs = {strategy: operations for strategy, (_, operations) in waiting.items()}
assert sizes["each"] < sizes["group_2"] < sizes["contiguous"] < 1.01 * sizes[None]
assert sizes["each"] < sizes["selective"] < 0.6 * sizes[None]
assert costs[None] == costs["selective"] < costs["4MiB"] < costs["each"]
assert sizes["4MiB"] < 4 + sizes[None] / LAYERS

# %% [markdown]
# ## The loading horizon
#
# PyTorch's own `save_on_cpu` copies a tensor back when the backward pass asks for it, and the GPU
# waits. With a horizon $h$ the backward pass of a block starts the copies of the $h$ blocks before
# it, so that they arrive while it computes; at most $h + 1$ blocks' tensors are on the device. A
# horizon of 1 hides a copy behind the backward pass of one block. Take more where a block's
# backward pass is shorter than the copy of its input, and pay $h$ blocks of memory.


# %%
def resident(rank: int, horizon: int) -> tuple[int, float, float]:
    """The most blocks with inputs on the device; MiB of them; MiB of host memory."""
    nl.init({})
    with nl.delayed_init(seed=0):
        model = gpt2()
    nl.checkpoint_activations(nl.shard(model), "each")
    nl.offload_activations(model, horizon, smallest=1)
    ids = tokens(0)
    for batch in nl.accumulate(model, [{"input_ids": ids, "labels": ids}] * 2):
        model(**batch).loss.backward()
    peak = nl.offload_peak(model)
    return peak.blocks, peak.nbytes / 2**20, peak.host_nbytes / 2**20


for horizon in (1, 2):
    ((blocks, on_device, on_host),) = nl.spmd.run(resident, 1, args=(horizon,))
    print(f"horizon {horizon}: {blocks} blocks' inputs on the device, {on_device:.2f} MiB; "
          f"host memory {on_host:.2f} MiB")  # fmt: skip
    assert blocks == horizon + 1

# %% [markdown]
# ## Fewer bytes per number
#
# Bfloat16 halves activations and what is gathered; master weights, gradients' sums and the
# optimizer stay in float32. Float16 does the same with less range, so gradients are scaled up on
# their way back and a step that overflows, on any rank, is skipped on all.


# %%
def in_float16(rank: int) -> list[tuple[float, bool]]:
    """The loss scale after each step, and whether it was skipped; one rank's gradient breaks."""
    mesh = nl.init({"fp16": True, "init_scale": 1024.0, "delayed_shift": 1, "scale_window": 2})
    with nl.delayed_init(seed=0):
        model = gpt2()
    model = nl.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(5):
        ids = tokens(step).chunk(mesh.data_ranks)[mesh.data_rank(rank)]
        for batch in nl.accumulate(model, [{"input_ids": ids, "labels": ids}]):
            loss = model(**batch).loss
            (loss * float("inf") if (step, rank) == (2, 1) else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        scaler = nl.loss_scaler(model)
        found.append((scaler.loss_scale, scaler.overflow))
    return found


scales = nl.spmd.run(in_float16, 2)
for step, (loss_scale, overflow) in enumerate(scales[0]):
    print(f"step {step}: loss scale {loss_scale:6.0f}{'   skipped' if overflow else ''}")
assert scales[0] == scales[1] and [skipped for _, skipped in scales[0]] == [0, 0, 1, 0, 0]

# %% [markdown]
# ## From a config
#
# ```toml
# [parallel]
# hybrid_shard_degree = 32
# shard_optimizer_state = true
# bf16 = true
# activation_loading_horizon = 2
#
# [activations]
# checkpoint = "each"
# offload = true
# ```
#
# `nearlinear train` writes `memory.json` and `memory.png` after its first step.
#
# ## Summary
#
# - States first: they are the same whatever the batch, and sharding them costs least.
# - Then activations: recompute; offload what recomputing still keeps.
# - Then divide the model itself, inside a node before across nodes.
# - Stop as soon as it fits: every further rung sends or computes more.
#
# ## Exercises
#
# 1. Swap two rungs: offload before tensor parallelism. What does the memory report say is next?
# 2. Double `LENGTH`. Which parts of the first rung's memory grow, and which rung gains?
# 3. With 16 ranks in replicas of 2, how much is left of the optimizer's state on a rank? Check it.
