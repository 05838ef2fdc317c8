# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Choosing a sharding degree, before you pay for a cluster
#
# After this notebook you can predict the memory per GPU and the step time of a model on machines
# that you have not rented, choose the number of GPUs that share one copy and justify it, and state
# the error of the prediction from examples where it is wrong.
#
# The question comes from a published tutorial: GPT-2 with 30 billion parameters, sequences of 2048
# tokens, 32 machines with 8 A100s of 40 GB each. Its authors shared the model over 128 of the 256
# GPUs. Why 128, and was it the best choice?
#
# All results are computed in seconds on any machine. Nothing is trained: `nl.plan` reads the config
# of `nearlinear train`, and the model is never built. The equivalent command is
#
#     nearlinear plan run.toml --cluster p4d.24xlarge:32

# %% tags=["parameters"]
scale = "ci"  # ci: search a few layouts; laptop, cluster: all layouts
cluster = "p4d.24xlarge:32"  # machine type and number
preset = "gpt2-30b"  # the model; nearlinear train --print-config lists the presets
sequence_length = 2048
global_batch = 1536  # sequences per step over all GPUs
tokens = 500e9  # training tokens, for days and cost

# %%
import copy
import math
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # ci, when Jupyter was started in this folder

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown

import ci
import nearlinear as nl
from nearlinear.planner import api, search, validate
from nearlinear.planner.api import parse_cluster
from nearlinear.planner.explain import three_billion_rule
from nearlinear.plots import (
    GRID,
    HATCHES,
    INK,
    LINES,
    MARKERS,
    PALETTE,
    predicted_against_published,
    show,
)

assert scale in ("ci", "laptop", "cluster"), f"scale = {scale!r}: use ci, laptop or cluster"
plt.rcParams["figure.dpi"] = 110
GIB = 2**30
place = parse_cluster(cluster)
published = tomllib.loads(
    (Path(ci.__file__).resolve().parents[1] / "notebooks/published.toml").read_text()
)


def bare(ax, axis="both"):
    """Axes with a light grid and no box."""
    ax.grid(axis=axis, color=GRID, lw=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def table(head, rows):
    """Markdown."""
    lines = [head, [":--"] * len(head), *rows]
    return Markdown("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines))


def with_(config, **leaves):
    """``config`` with leaves such as ``parallel__bf16=True``."""
    changed = copy.deepcopy(config)
    for name, value in leaves.items():
        section, key = name.split("__")
        changed.setdefault(section, {})[key] = value
    return changed


# %% [markdown]
# ## The question, as a config
#
# The global batch is given: 1536 sequences. With 256 GPUs that each read their own data, this is 6
# sequences per GPU and step. The planner needs only these few lines; all other settings are the
# defaults of `nearlinear train`.

# %%
per_gpu = global_batch // place.world
assert per_gpu * place.world == global_batch, "Choose a global batch that is divisible by the GPUs."
question = {
    "model": {"preset": preset},
    "data": {"sequence_length": sequence_length},
    "parallel": {"hybrid_shard_degree": min(128, place.world), "bf16": True},
    "batch": {"micro_batch_size": per_gpu},
    "activations": {"checkpoint": "each"},
}
plan = nl.plan(question, cluster, tokens=tokens)
print(plan)

# %% [markdown]
# ## Notation
#
# | symbol | meaning | here |
# |:--|:--|:--|
# | $P$ | parameters | 30 billion |
# | $G$ | GPUs | 256 |
# | $p$ | GPUs that share one copy of the model: `hybrid_shard_degree` | 8 to 256 |
# | $r = G / p$ | copies, or replicas | |
# | $k$ | GPUs of a machine | 8 |
# | $b$ | sequences per GPU in one pass: `micro_batch_size` | 6 |
# | $s$ | tokens per sequence | 2048 |
# | $B$ | bytes per second into a machine, over its network | 50 GB/s (400 Gbit/s) |
# | $F$ | operations per second that a GPU does | |
#
# ## Model states
#
# In mixed precision a parameter takes 16 bytes, all in float32: 12 persistent bytes, its value and
# the two averages of AdamW, and 4 bytes of gradient from the backward pass to the update. These
# bytes are divided by $p$. (The bfloat16 copies used in computation are created when a block is
# gathered, and freed after it.)

# %%
parameters = plan.work.shape.parameters
states = 16 * parameters
print(f"P = {parameters / 1e9:.2f} billion; states take {states / GIB:.0f} GiB")
for degree in (1, 8, 16, 32, 64, 128, 256):
    print(f"  shared by {degree:>3}: {states / degree / GIB:7.1f} GiB per GPU")
one = states / GIB / place.gpu.memory_gib
print(f"One copy fills at least {math.ceil(one)} GPUs of {place.gpu.memory_gib:.0f} GiB, "
      "without any other memory.")  # fmt: skip

# %% [markdown]
# ## Other memory, and the degrees that fit
#
# Other memory consists of the inputs of all blocks (each block is recomputed in the backward pass),
# one block's activations during recomputation, the logits, the parameters of the currently gathered
# blocks, and the reserve of CUDA, NCCL and the allocator. Hardly any of it shrinks with $p$. Memory
# therefore falls quickly at first and then hardly at all: sharing over *all* GPUs, as ZeRO-3 and
# plain FSDP do, saves little more.

# %%
degrees = [d for d in (8, 16, 32, 64, 128, 256) if place.world % d == 0]
plans = {d: nl.plan(with_(question, parallel__hybrid_shard_degree=d), cluster) for d in degrees}

figure, ax = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
lasting = np.array([states / d / GIB for d in degrees])
needed = np.array([plans[d].memory / GIB for d in degrees])
where = np.arange(len(degrees))
ax.bar(where, lasting, 0.62, color=PALETTE[0], label="states, shared")
ax.bar(where, needed - lasting, 0.62, lasting, color=PALETTE[1], label="everything else",
       hatch=HATCHES[1], edgecolor="white")  # fmt: skip
ax.axhline(place.gpu.memory_gib, color=INK, lw=1, ls="--")
ax.text(
    len(degrees) - 0.6,
    place.gpu.memory_gib + 1,
    f"memory of {place.gpu.name}",
    ha="right",
    color=INK,
)
ax.set_xticks(where, degrees)
ax.set(xlabel="GPUs that share one copy", ylabel="memory per GPU, GiB")
ax.legend(frameon=False)
bare(ax, "y")
show(
    alt="Memory per GPU over the number of GPUs that share one copy: "
    f"{needed[0]:.0f} GiB at {degrees[0]} and {needed[-1]:.0f} GiB at {degrees[-1]}. Only the "
    f"states "
    "shrink; everything else stays."
)

fitting = [d for d in degrees if plans[d].fits]
print(f"fit: {fitting}")
assert fitting, "No degree fits. Use more machines, or fewer sequences per GPU."
assert all(a > b for a, b in zip(needed, needed[1:], strict=False))

# %% [markdown]
# ## The time cost of a degree
#
# Per pass every parameter is gathered twice (forward and backward) and its gradient reduced once. A
# ring over $p$ GPUs brings the whole tensor, except its own part, into every machine, independent
# of $p$. A large group does not send more bytes, but it sends them over the network instead of
# within a machine, in more and smaller steps, and each of the $p - 1$ hops costs a latency.
# Communication is hidden if the network can carry the bytes within the time of the computation:
#
# $$\underbrace{\frac{8 P b s}{F}}_{\text{compute}} \quad\text{against}\quad
# \underbrace{\frac{2 \cdot 2 P + 4 P}{B}}_{\text{gather twice in 2 bytes, reduce in 4}}$$
#
# $P$ cancels: the ratio depends on the tokens per GPU and pass, $bs$, not on the size of the model.

# %%
rows = []
for degree in degrees:
    p = plans[degree]
    exposed = {kind: value for kind, value in p.step.exposed.items() if value > 0}
    worst = max(exposed, key=exposed.get)
    rows.append(
        [degree, f"{p.seconds:.2f}", f"{p.mfu:.1%}", f"{p.memory / GIB:.1f}",
         "yes" if p.fits else "**no**", f"{worst}, {exposed[worst] / p.seconds:.1%}"]
    )  # fmt: skip
table(
    ["GPUs that share", "seconds per step", "MFU", "GiB", "fits", "longest wait"],
    rows,
)

# %%
fastest = min(fitting, key=lambda d: plans[d].seconds)
published_choice = min(128, place.world)
loss = plans[published_choice].seconds / plans[fastest].seconds - 1
print(f"smallest that fits: {fitting[0]}; fastest that fits: {fastest}; "
      f"{published_choice} GPUs take {loss:.1%} longer")  # fmt: skip

# %% [markdown]
# With six sequences of 2048 tokens per pass, the GPUs compute long enough to hide the network, and
# the degree hardly matters as long as it fits. This depends on the batch. The figure shows the same
# model with fewer tokens per pass, with the batch of the step kept by accumulation.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.4), layout="constrained")
sizes = [size for size in (1, 2, 3, 6) if per_gpu % size == 0]
slowdown = {}
for color, marker, size in zip(LINES, MARKERS, sizes, strict=False):
    changed = with_(question, batch__micro_batch_size=size, batch__accumulation=per_gpu // size)
    found = [nl.plan(with_(changed, parallel__hybrid_shard_degree=d), cluster) for d in degrees]
    slowdown[size] = found[-1].seconds / found[0].seconds
    label = f"{size} x {sequence_length} tokens a pass"
    left.plot(degrees, [p.seconds for p in found], marker=marker, color=color, label=label)
    for d, p in zip(degrees, found, strict=True):
        right.plot(p.memory / GIB, p.seconds, marker, color=color, mfc=color if p.fits else "none")
        if size == sizes[0] and d in (*degrees[:2], degrees[-1]):
            right.annotate(d, (p.memory / GIB, p.seconds), (0, 7), textcoords="offset points",
                           color=INK, fontsize=8, ha="center")  # fmt: skip
left.set_xscale("log", base=2)
left.set_xticks(degrees, degrees)
left.set(xlabel="GPUs that share one copy", ylabel="seconds per step", ylim=(0, None))
left.set_ylim(0, 1.15 * left.get_ylim()[1])
left.legend(frameon=False, fontsize=9)
right.axvline(place.gpu.memory_gib, color=INK, lw=1, ls="--")
right.set(xlabel="memory per GPU, GiB (hollow: does not fit)", ylabel="seconds per step")
right.set_ylim(left.get_ylim())
for ax in (left, right):
    bare(ax)
show(
    alt="Left: seconds per step over the number of GPUs that share one copy, with a line per "
    "number of "
    "sequences in a pass. Right: the same steps over memory. With one sequence a pass the degree "
    f"changes the time by a factor of {max(slowdown.values()):.1f}; with {sizes[-1]} hardly at all."
)
if len(sizes) > 1:
    assert slowdown[sizes[0]] > slowdown[sizes[-1]]  # with fewer tokens per pass the degree matters

# %% [markdown]
# ## Timeline of a step
#
# The figure shows the streams of one step at one sequence per pass, where communication is exposed.
# A bar is a task. Computation is at the top; in its gaps the GPU waits.

# %%
shown = nl.plan(with_(question, batch__micro_batch_size=1), cluster)
figure, ax = plt.subplots(figsize=(9.2, 2.6), layout="constrained")
shown.figure(ax)
show(
    alt="Timeline of one step with a row per stream: network, compute and optimizer. Computation "
    "waits in its gaps for the all-gathers and reduce-scatters of the network."
)
print(shown.bottleneck)

# %% [markdown]
# ## Search over all layouts
#
# Sharding is one of several methods to divide a model; tensor and pipeline parallelism are others,
# and activations can be kept, recomputed or offloaded. `--search` tries all combinations that
# divide the GPUs, fit in memory and keep the batch, and ranks them.

# %%
if scale == "ci":
    search.TENSOR, search.PIPELINE = (1, 8), (1, 4)  # fewer candidates
layouts = search.search(plan.config, place, most=8)
print(search.format_candidates(layouts, place))
best = layouts[0]
print(f"\nthe fastest takes {best.seconds:.2f} s, the published choice of degree "
      f"{plan.seconds:.2f} s: {plan.seconds / best.seconds - 1:.1%} more")  # fmt: skip
assert best.seconds <= plan.seconds * 1.001

# %% [markdown]
# ## Days and dollars
#
# The price is the on-demand price of the machine in `hardware.toml`, with its date. It serves as a
# scale for comparison; long reservations are cheaper. The published run used SMP 1.11 with Hugging
# Face's GPT-2, whose attention materializes its scores; the modelled run is this library's, with
# fused attention. The two programs differ, and their numbers are not divided by each other.

# %%
(reference,) = (row for row in published["rows"] if row.get("shard_degree"))
rows = [
    ["published, DeepSpeed 0.7.2", reference["baseline"]["value"], "", ""],
    ["published, SMP 1.11", reference["faster"]["value"], reference["days_500b"], ""],
    ["modelled, shared by " + str(published_choice), f"{global_batch / plan.seconds:.1f}",
     f"{plan.days:.1f}", f"{plan.usd:,.0f}"],
]  # fmt: skip
table(["", "sequences per second", f"days for {tokens / 1e9:.0f} billion tokens", "USD"], rows)

# %% [markdown]
# ## The rule of three billion
#
# The tutorial's rule: one machine per 3 billion parameters in the sharing group, rounded up to a
# power of two. For 30 billion parameters it gives 10, rounded up to 16 machines, or 128 GPUs. Is
# the rule right? The next cell computes, for several sizes, the smallest group that fits and the
# fastest group, with the same step divided into four passes of one sequence, or one pass of four.

# %%
SHAPES = {  # layers, width, heads
    "1.5B": (48, 1600, 25),
    "3B": (36, 2560, 32),
    "10B": (50, 4096, 32),
    "18B": (40, 6144, 48),
    "30B": (48, 7168, 64),
    "60B": (74, 8192, 64),
    "100B": (80, 10240, 80),
}


def gpt2(name, **leaves):
    layers, width, heads = SHAPES[name]
    shape = {"n_layer": layers, "n_embd": width, "n_head": heads}
    base = {
        "model": {"preset": "gpt2-30b", "overrides": shape},
        "data": {"sequence_length": sequence_length},
        "parallel": {"bf16": True},
        "activations": {"checkpoint": "each"},
    }
    return with_(base, **leaves)


powers = [2**n for n in range(place.world.bit_length()) if place.world % 2**n == 0]
rows, verdicts = [], {}
for name in SHAPES:
    for size in (1, 4):
        tried = {
            d: nl.plan(
                gpt2(
                    name,
                    parallel__hybrid_shard_degree=d,
                    batch__micro_batch_size=size,
                    batch__accumulation=4 // size,
                ),
                cluster,
            )
            for d in powers
        }
        fits = [d for d in powers if tried[d].fits]
        wanted = three_billion_rule(tried[1])
        if not fits:
            rows.append([name, size, wanted, "none", "", "", "too bold: nothing fits"])
            continue
        quickest = min(fits, key=lambda d: tried[d].seconds)
        if wanted in fits:
            cost = tried[wanted].seconds / tried[quickest].seconds - 1
            verdict = "right" if wanted == fits[0] else "cautious"
        else:
            cost, verdict = math.nan, "too small: does not fit"
        verdicts[name, size] = verdict, cost
        rows.append([name, size, wanted, fits[0], quickest,
                     "" if math.isnan(cost) else f"{cost:.1%}", verdict])  # fmt: skip
table(
    ["parameters", "sequences per pass", "the rule's degree", "smallest that fits", "fastest",
     "slowdown by the rule", "verdict"],
    rows,
)  # fmt: skip

# %% [markdown]
# The table shows:
#
# - **The rule is cautious.** In nearly every row half of it fits, often a quarter. The remaining
#   memory has room for a larger pass, and a larger pass is worth more than a smaller group.
# - **It costs most if one machine is enough.** Ten billion parameters fit on the 8 GPUs of one
#   machine; with the rule, every gather crosses the network. At one sequence per pass that costs
#   two fifths of the step, at four a twentieth.
# - **In other cases it costs next to nothing.** Once a group spans machines, a larger one is as
#   fast, as the formula above shows: the bytes into a machine hardly depend on the degree.
# - **It depends neither on the GPU nor on the sequence length.** With twice the memory, a fraction
#   of it is enough. With long sequences it can be too small, as the next cell shows: activations
#   are not shared.

# %%
cautious = [key for key, (verdict, _) in verdicts.items() if verdict == "cautious"]
print(f"cautious in {len(cautious)} of {len(verdicts)} cases")
if cluster == "p4d.24xlarge:32" and sequence_length == 2048:  # two fifths, and a twentieth
    assert 0.35 < verdicts["10B", 1][1] < 0.45 and 0.04 < verdicts["10B", 4][1] < 0.06
LENGTHS = (512, 2048, 8192, 32768, 65536)
rows = []
for machines in ("p4d.24xlarge:32", "p4de.24xlarge:32", "p5.48xlarge:32"):
    fits = {}
    for length in LENGTHS:
        settings = {"batch__micro_batch_size": 1, "data__sequence_length": length,
                    "model__context": max(length, 2048)}  # fmt: skip
        found = [d for d in powers if nl.plan(
            gpt2("30B", parallel__hybrid_shard_degree=d, **settings), machines).fits]  # fmt: skip
        fits[length] = found[0] if found else "none"
    rows.append([machines, parse_cluster(machines).gpu.name, *fits.values()])
table(["30B on", "GPU", *(f"{length} tokens" for length in LENGTHS)], rows)

# %% [markdown]
# ## The reference configurations, modelled
#
# The best practices of the same library give three layouts for GPT-2 at 512 tokens. They split
# matrices over the GPUs of a machine and share the optimizer state over the remaining ranks (not
# the parameters). The shapes of the models with 10 and 60 billion parameters are not published; the
# ones above are our choice. Each layout is followed by the same batch with shared parameters, and
# by the best layout of the search.

# %%
REFERENCES = [
    ("10B", "p4d.24xlarge:16", {"tensor_parallel_degree": 4}, 40),
    ("30B", "p4d.24xlarge:16", {"tensor_parallel_degree": 8}, 32),
    ("60B", "p4d.24xlarge:32", {"tensor_parallel_degree": 8, "pipeline_parallel_degree": 2,
                                "pipeline": "simple", "microbatches": 4,
                                "active_microbatches": 2}, 56),
]  # fmt: skip
rows = []
for name, machines, layout, batch in REFERENCES:
    split = layout["tensor_parallel_degree"] * layout.get("pipeline_parallel_degree", 1)
    readers = parse_cluster(machines).world // split
    of = {f"parallel__{key}": value for key, value in layout.items()}
    short = {"batch__micro_batch_size": batch, "data__sequence_length": 512}
    as_given = {"parallel__hybrid_shard_degree": 1, "parallel__shard_optimizer_state": True}
    given = nl.plan(gpt2(name, **of, **short, **as_given), machines)
    shared = nl.plan(gpt2(name, **of, **short, parallel__hybrid_shard_degree=readers), machines)
    found = search.search(given.config, given.cluster, most=1)[0]
    changes = found.changes
    words = ", ".join(
        f"{axis} {changes[f'parallel.{key}']}"
        for axis, key in (("shard", "hybrid_shard_degree"), ("tensor", "tensor_parallel_degree"),
                          ("pipeline", "pipeline_parallel_degree"))
        if changes[f"parallel.{key}"] > 1
    )  # fmt: skip
    rows += [
        [f"**{name}**, {machines}", f"as given: tensor {layout['tensor_parallel_degree']}"
         + (", pipeline 2" if split > 8 else ""), f"{given.memory / GIB:.1f}",
         "yes" if given.fits else "**no**", f"{given.seconds:.2f}"],
        ["", f"and parameters shared by {readers}", f"{shared.memory / GIB:.1f}",
         "yes" if shared.fits else "**no**", f"{shared.seconds:.2f}"],
        ["", f"searched: {words}", f"{found.memory / GIB:.1f}", "yes", f"{found.seconds:.2f}"],
    ]  # fmt: skip
    assert shared.fits and found.seconds <= shared.seconds * 1.001
    held = {part: size / GIB for part, size in given.memory_estimate.parts.items() if size > GIB}
    print(f"{name} as given, GiB:", *(f"{part} {size:.1f}" for part, size in held.items()))
table(["model, cluster", "layout", "GiB per GPU", "fits", "seconds per step"], rows)

# %% [markdown]
# With 10 and 30 billion parameters the layouts fit. With 60 billion parameters the layout does not
# fit *in this library*, which keeps values and sums of gradients in float32, while the published
# one kept both in 16 bits; a pipeline also holds the gradients of a stage twice while its replicas
# reduce them. The parameters and gradients are too large, and sharing divides exactly these.
#
# With whole parameters on every replica, whole gradients must be reduced over the network once per
# step, at the end; with one pass per step there is little computation to hide it. The search finds
# layouts that share parameters and make more and smaller passes.

# %% [markdown]
# ## The published tables, modelled
#
# The planner now predicts published measurements, from the known properties of *their* programs
# (attention that is not fused, gathers that wait for each other, other libraries' collectives). No
# constant belongs to one source.

# %%
found = validate.validate()
rows = []
for each in found.scored:
    if each.run.source.startswith("AWS"):
        values = each.run.row.values
        rows.append([each.run.title, f"{values['gpus']} {values['gpu']}, sequence {values['seq']}",
                     values["note"], f"{each.run.value:.2f}", f"{each.predicted:.2f}",
                     f"{each.error:+.1%}"])  # fmt: skip
table(["model", "cluster", "system", "published, s", "modelled, s", "error"], rows)

# %% [markdown]
# The table has all published runs that can be modelled, and the errors with each source left out of
# the fit:

# %%
figure, ax = plt.subplots(figsize=(6.4, 4.6), layout="constrained")
predicted_against_published(found, ax)
show(
    alt="Predicted over published seconds per step of all published runs, by source, on "
    "logarithmic "
    "axes. The points lie around the diagonal, with bands of 10 and 25 %."
)
print(found)

# %% [markdown]
# Two columns matter to you. *Median* is the error of predictions for runs like those of the fit.
# *Median, left out* is the error for a source unknown to the fit: expect it for your runs. The
# ranking states how often the planner finds the faster of two layouts, its purpose in this
# notebook.

# %% [markdown]
# ## Near-linear, to 128 machines and beyond
#
# The model is Llama-2 with 70 billion parameters, on 16 to 128 p4d machines, with one sequence of
# 4096 tokens per GPU and pass. Shared over all GPUs, a gather is a ring over all of them, and its
# latency grows with their number. Shared over 64 or 128, additional GPUs are additional copies,
# which synchronize once per step. Beyond 128 machines the prediction cannot be verified here; it is
# drawn dashed.

# %%
llama = {
    "model": {"preset": "llama2-70b"},
    "parallel": {"bf16": True},
    "batch": {"micro_batch_size": 1},
    "activations": {"checkpoint": "each"},
}
figure, ax = plt.subplots(figsize=(7.6, 3.6), layout="constrained")
kept = {}
everywhere = [16 * 2**n for n in range(8)]
for color, marker, degree in zip(LINES, MARKERS, (0, 128, 64), strict=False):
    label = f"shared by {degree}" if degree else "shared by all"
    if degree:
        changed = with_(llama, parallel__hybrid_shard_degree=degree)
        start = nl.plan(changed, "p4d.24xlarge:16")
        points = api.scaling_curve(start.config, start.cluster)
        gpus, rates = zip(*[(p.gpus, p.tokens_per_second_per_gpu) for p in points], strict=True)
    else:  # all GPUs of the cluster
        gpus = [8 * nodes for nodes in everywhere]
        rates = [nl.plan(llama, f"p4d.24xlarge:{n}").tokens_per_second_per_gpu for n in everywhere]
    share = np.array(rates) / rates[0]
    kept[degree] = dict(zip(gpus, share, strict=True))
    real = np.array(gpus) <= 1024
    ax.plot(np.array(gpus)[real], share[real], marker=marker, color=color, label=label)
    ax.plot(np.array(gpus)[gpus.index(1024) :], share[gpus.index(1024) :], ls="--", marker=marker,
            color=color, mfc="none")  # fmt: skip
ax.set_xscale("log", base=2)
ax.set_xticks(gpus, [f"{g:,}" for g in gpus])
ax.set(
    xlabel="GPUs (dashed: beyond 128 machines)",
    ylabel="rate per GPU, relative to 128",
    ylim=(0, 1.06),
)
ax.legend(frameon=False)
bare(ax)
show(
    alt="Tokens per second and GPU relative to 128 GPUs, over the number of GPUs. Copies shared "
    "by 64 "
    f"or 128 GPUs keep {kept[64][16384]:.0%} and {kept[128][16384]:.0%} at 16,384 GPUs; a copy "
    f"shared "
    f"by all keeps {kept[0][16384]:.0%}."
)
for degree, shares in kept.items():
    print(f"shared by {degree or 'all':>3}: at 1,024 GPUs {shares[1024]:.1%} of the rate per GPU, "
          f"at 16,384 {shares[16384]:.1%}")  # fmt: skip
assert kept[128][1024] > 0.95, "128 machines must be near-linear where 128 GPUs share"
assert kept[128][16384] > kept[0][16384]

# %% [markdown]
# This is the reason to share over some GPUs instead of all: not the speed on your 32 machines with
# six sequences per pass, but the constant speed when there are more.
#
# ## Limits of the prediction
#
# - **Times** of an unknown source have the error of the column *left out*. For GPUs and layouts
#   without a published run the error is unknown, and `nearlinear plan` prints a note.
# - **Memory** is compared with a step of the real code on tensors without memory (`nearlinear plan
#   --dry-run`), and with published peaks of another library. No run of nearlinear on GPUs has been
#   compared: the memory of CUDA and NCCL is an estimate in the reserve.
# - **Other users** of the network, slow disks and slow GPUs are not included, except by
#   `--straggler`.
# - `nearlinear tune` measures the assumptions on your machines once you have them.
#
# ## Try it
#
# 1. Set `cluster = "p5.48xlarge:16"`: the network is eight times as fast, but the GPUs are not.
#    Which degree is the fastest now?
# 2. `preset = "llama2-70b"`, `sequence_length = 4096`, `global_batch = 512`: does 64 fit on p4d?
# 3. Your own config: `nearlinear plan run.toml --cluster ... --explain`, then
#    `nearlinear plan run.toml --cluster ... --search --explain`. Which changes does it suggest?
