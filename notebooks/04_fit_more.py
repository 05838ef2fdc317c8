# %% [markdown]
# # Fit more: a ladder of techniques and their costs
#
# After this notebook you can name the part of a training step's memory that each technique reduces,
# apply the techniques in the order of their benefit, and read a memory report to choose the next
# one. The same GPT-2 runs with every technique; its losses stay the same.
#
# Everything runs on this machine: the eight ranks are threads; sharding, recomputation, copies to
# and from host memory and collectives are real. Bytes, operations and messages are counted and
# therefore equal those of eight GPUs. Times would not, and are not shown.

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
# ## Parts of a rank's memory
#
# With AdamW a parameter takes 16 bytes on a rank that holds all of it: 4 for the value, 4 for the
# gradient, 8 for the two averages of the optimizer. In addition to these *model states* there are
# *activations*, which grow with the batch, the sequence and the layers, and, if ranks share the
# parameters, the *gathered* ones of the current block. `nl.memory_report` measures one step:

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
    """Count operations of matrix products, as PyTorch's `FlopCounterMode`, in all modules alike.

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
    """A technique in addition to the previous rungs."""

    name: str
    config: dict
    checkpoint: str | None = None
    offload: int | None = None


def train(rank: int, rung: Rung) -> dict:
    """Return the memory and work of the last step on this rank, and the losses of all steps."""
    mesh = nl.init(rung.config)
    with nl.deferred_init(seed=0):
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
# The largest rows are the next to reduce: here, the activations saved by the blocks.
#
# ## The ladder
#
# AWS's best practices for its model parallel library recommend an order: shard the optimizer state,
# recompute activations, then tensor parallelism within a node, pipeline parallelism across nodes,
# and activations in host memory last. Sharded data parallelism was added after the first step:
# parameters and gradients are sharded too, among neighbouring ranks. Every rung keeps the
# techniques before it. The global batch stays the same: 16 sequences.

# %%
SHARED = plain.config | {"shard_optimizer_state": True}
MICS = SHARED | {"hybrid_shard_degree": 2, "sdp_max_live_parameters": 0}
TENSOR = MICS | {"tensor_parallel_degree": 2}
PIPELINE = TENSOR | {"pipeline_parallel_degree": 2, "microbatches": 4}
PIPELINE |= {"shard_optimizer_state": False}  # only one replica remains

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
most = [  # maximum over ranks; pipeline stages differ
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
styles = zip(plots.PALETTE, plots.HATCHES, SHOWN.items(), strict=False)
for colour, hatch, (part, name) in styles:
    sizes = [parts[part] for parts in most]
    left.barh(places, sizes, left=begin, color=colour, hatch=hatch, edgecolor="white",
              label=name)  # fmt: skip
    begin = [a + b for a, b in zip(begin, sizes, strict=True)]
left.set_yticks(places, [rung.name for rung in ladder])
left.invert_yaxis()
left.set_xlabel("MiB per rank, maximum over ranks")
left.legend(frameon=False)
for offset, values, label in ((-0.2, work, "operations"), (0.2, sent, "bytes in collectives")):
    right.barh([place + offset for place in places], [value / values[0] for value in values], 0.4,
               color=plots.PALETTE[5 * (offset > 0)], hatch=plots.HATCHES[offset > 0],
               edgecolor="white", label=label)  # fmt: skip
right.set_xlabel("per step, relative to the first rung")
right.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
for ax in (left, right):
    ax.spines[["top", "right"]].set_visible(False)
plots.show(
    alt="Left: memory per rank by category falls with every added technique, from "
    f"{total[0]:.1f} to {total[-1]:.1f} MiB. Right: the "
    f"operations of a step grow to {work[-1] / work[0]:.1f} times and the bytes in collectives to "
    f"{sent[-1] / sent[0]:.1f} times those of data parallelism."
)

# %% [markdown]
# The figure shows:
#
# - Sharding the optimizer state divides gradients and averages by all eight ranks. The all-reduce
#   becomes a reduce-scatter and an all-gather, the two halves of an all-reduce. (Collectives are
#   counted by their larger side, so that the two count twice.)
# - Sharding the parameters in pairs halves them. At any moment, only a few blocks are gathered.
# - Selective recomputation keeps the outputs of matrix products and attention. It removes nearly
#   half of the activations without repeating a product. Full recomputation costs one more forward
#   pass of the blocks. It leaves one input per block, and the activations of the block that is
#   being recomputed.
# - Tensor and pipeline parallelism divide the states again, and place more of the batch on a rank.
# - Offloading removes the inputs of all but two blocks; with few layers that is little next to the
#   recomputed block. It costs neither operations nor messages, because copies overlap with
#   computation.

# %%
(dp, over_replicas, mics, selective, again, tensor, pipeline, offload) = most
assert all(
    abs(a - b) < 1e-5
    for of_rung in found
    for of_rank in of_rung
    for a, b in zip(of_rank["losses"], found[0][0]["losses"], strict=True)
)
for part in ("optimizer", "gradients"):
    assert over_replicas[part] < 1.01 * dp[part] / 8  # AdamW also stores step counts
assert over_replicas["parameters"] == dp["parameters"] == 2 * mics["parameters"]
assert dp["gathered"] == 0 < mics["gathered"] < mics["parameters"]
assert again["activations"] < 0.6 * selective["activations"] < 0.36 * mics["activations"]
assert again["activations"] > mics["activations"] / LAYERS  # one block and the inputs
assert work[0] == work[2] == work[3] and 1.1 < work[4] / work[2] < 4 / 3 + 0.01
assert sent[4] == sent[3] == sent[2]
assert tensor["parameters"] < 0.52 * again["parameters"]  # norms are on both tensor ranks
assert offload["activations"] < pipeline["activations"]
assert work[7] == work[6] and sent[7] == sent[6]
assert total[-1] < total[0] / 5

# %% [markdown]
# ## Recomputation of blocks
#
# `nl.checkpoint_activations(model, strategy)` selects the recomputed parts. `"each"` recomputes
# every block on its own and keeps one input per block. `"group_N"` keeps fewer inputs, but a whole
# group's activations return at once, and its parameters are gathered once more: it pays for long
# models, in which inputs dominate. `"selective"` keeps the outputs of matrix products and of
# attention, and recomputes norms, activation functions and dropout, at nearly no cost. A budget
# such as `"4MiB"` recomputes as few blocks as possible while the activations kept between the
# passes fit. The table shows the peak, recomputed activations included.


# %%
def kept(rank: int, strategy: str | None) -> tuple[float, float]:
    """Return the peak MiB of activations and the GFLOP of a step."""
    nl.init({})
    with nl.deferred_init(seed=0):
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
# PyTorch's `save_on_cpu` copies a tensor back when the backward pass needs it, and the GPU waits.
# With a horizon $h$, the backward pass of a block starts the copies of the $h$ blocks before it, so
# that they arrive during computation; at most $h + 1$ blocks' tensors are on the device. A horizon
# of 1 hides a copy behind the backward pass of one block. Use a larger horizon if a block's
# backward pass is shorter than the copy of its input, at the cost of $h$ blocks of memory.


# %%
def resident(rank: int, horizon: int) -> tuple[int, float, float]:
    """Return the peak number of blocks on the device, their MiB, and the MiB of host memory."""
    nl.init({})
    with nl.deferred_init(seed=0):
        model = gpt2()
    nl.checkpoint_activations(nl.shard(model), "each")
    nl.offload_activations(model, horizon, smallest=1)
    ids = tokens(0)
    for batch in nl.accumulate(model, [{"input_ids": ids, "labels": ids}] * 2):
        model(**batch).loss.backward()
    peak = nl.activation_offload_stats(model)
    return peak.blocks, peak.nbytes / 2**20, peak.host_nbytes / 2**20


for horizon in (1, 2):
    ((blocks, on_device, on_host),) = nl.spmd.run(resident, 1, args=(horizon,))
    print(f"horizon {horizon}: {blocks} blocks' inputs on the device, {on_device:.2f} MiB; "
          f"host memory {on_host:.2f} MiB")  # fmt: skip
    assert blocks == horizon + 1

# %% [markdown]
# ## Fewer bytes per number
#
# Bfloat16 halves activations and gathered parameters; master weights, gradient sums and the
# optimizer stay in float32. Float16 halves them too, with a smaller range. Gradients are therefore
# scaled during the backward pass, and a step that overflows on any rank is skipped on all ranks.


# %%
def in_float16(rank: int) -> list[tuple[float, bool]]:
    """Return the loss scale and the skip flag of each step; one rank's gradient overflows."""
    mesh = nl.init({"fp16": True, "init_scale": 1024.0, "delayed_shift": 1, "scale_window": 2})
    with nl.deferred_init(seed=0):
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
# - Start with the states: they are independent of the batch, and sharding them costs least.
# - Continue with activations: recompute them, and offload the remaining inputs.
# - Then divide the model itself, within a node before across nodes.
# - Stop as soon as the model fits: every further rung sends or computes more.
#
# ## Exercises
#
# 1. Swap two rungs: offload before tensor parallelism. Which technique does the memory report
#    suggest next?
# 2. Double `LENGTH`. Which parts of the first rung's memory grow, and which rung gains?
# 3. With 16 ranks in replicas of 2, which share of the optimizer state remains on a rank? Check it.
