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
# # Benchmark tables: published, measured here, modelled
#
# After this notebook you can recompute a published speed-up, its TFLOPS and its days of training
# from the raw numbers, distinguish FLOPS of the hardware from FLOPS of the model, bound the
# speed-up of any library, and judge the meaning of measurements on 2 cores for 32 nodes of GPUs.
#
# The published numbers made the case for the predecessors of this project: GPT-2 with 30 billion
# parameters, 39.7 % faster than DeepSpeed ZeRO-3 on 256 GPUs. Here each published number stands
# next to a measurement of this project, if a counterpart was measured; no gap is filled.

# %% tags=["parameters"]
scale = "ci"  # ci: stored comparisons; laptop: also compare on this machine; cluster: as ci
systems = ""  # compared on this machine, such as "compute fsdp2 ours_nl"; empty: a selection
results = ""  # folder of stored comparisons; empty: those of the repository

# %%
import subprocess
import sys
import tempfile
import tomllib
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # ci, when Jupyter was started in this folder

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Markdown, display
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, logging

import ci
from ci.benchmarks.compare import race, report
from ci.benchmarks.compare import results as comparisons
from ci.benchmarks.compare.report import deviating_systems
from ci.benchmarks.compare.systems import SYSTEMS
from ci.benchmarks.network.config import parse_rate
from ci.emulation import cluster
from nearlinear.planner import validate
from nearlinear.plots import GRID, HATCHES, INK, LINES, MARKERS, MUTED, PALETTE, show

assert scale in ("ci", "laptop", "cluster"), f"scale = {scale!r}: use ci, laptop or cluster"
logging.set_verbosity_error()  # of transformers
repository = Path(ci.__file__).resolve().parents[1]
keeper = tempfile.TemporaryDirectory(prefix="nearlinear-06-")  # removed when the kernel ends
work = Path(keeper.name)
DASH = "—"


def bare(ax, axis="both"):
    """Axes with a light grid and no box."""
    ax.grid(axis=axis, color=GRID, lw=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def table(head, rows):
    """Return a Markdown table, or a sentence without rows."""
    if not rows:
        return Markdown("*Nothing measured yet.*")
    lines = [head, [":--"] * len(head), *rows]
    return Markdown("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines))


# %% [markdown]
# ## Three kinds of numbers
#
# - **Published**: a number as printed by its source. `published.toml` has the numbers and the
#   sources.
# - **Measured here**: a ratio between systems of one comparison on an emulated cluster, read from
#   the files of `ci/benchmarks/compare/results`, each of which contains the command that wrote it.
# - **Modelled**: the planner's prediction for the published system on the published cluster
#   (`nearlinear plan --validate`; notebook 07). Its constants were fitted to these and 200 other
#   published runs, so that a small error here is no evidence; notebook 07 has the errors on sources
#   that were left out of the fit.
#
# The three kinds are never averaged, never divided by each other, and never drawn on one axis. A
# dash means that no such number exists. Numbers computed *from* published numbers are called
# recomputed.
#
# | symbol | meaning |
# |:--|:--|
# | $P$ | parameters |
# | $L$, $h$ | layers, and their width |
# | $s$ | tokens per sequence |
# | $G$ | GPUs |
# | $v$ | sequences per second on all GPUs together, as published |

# %%
published = tomllib.loads((repository / "notebooks/published.toml").read_text())
sources = published["sources"]
rows = published["rows"]
per_node = published["instance"]["gpus"]


def setting(row):
    parts = [row["model"], f"sequence {row['sequence']}"]
    if "nodes" in row:
        parts.append(f"{row['nodes']} nodes, {row['nodes'] * per_node} GPUs")
    if "tensor_parallel" in row:
        parts.append(f"tensor parallel {row['tensor_parallel']}")
    return ", ".join(parts)


assert all(row["source"] in sources for row in [*rows, *published["statements"]])
for name, source in sources.items():
    print(f"{name:<12} {source['publisher']}: “{source['title']}”, {source['year']}")
table(
    ["setting", "baseline", "its speed", "faster one", "its speed", "unit", "speed-up", "source"],
    [
        [
            setting(row),
            row["baseline"]["system"],
            row["baseline"].get("value", DASH),
            row["faster"]["system"],
            row["faster"]["value"],
            row["unit"],
            f"{row['percent']} %",
            row["source"],
        ]
        for row in rows
    ],
)

# %% [markdown]
# ## Recomputed: the percentages
#
# A speed-up is the ratio of two speeds, minus one. The published percentages follow from the
# published speeds, although some digits were truncated: 24.476 % is printed as 24.40 %, and the
# text around the 30-billion table says 39.7 % where the table has 39.77 %. For the 10-billion model
# the source prints no second speed; the implied speed is recomputed, not published.

# %%
for row in rows:
    fast, slow = row["faster"]["value"], row["baseline"].get("value")
    if slow is None:
        print(f"{setting(row)}: {row['percent']} % imply a baseline of "
              f"{fast / (1 + row['percent'] / 100):.0f} {row['unit']}")  # fmt: skip
        continue
    percent = 100 * (fast / slow - 1)
    print(f"{setting(row)}: {fast} / {slow} is {percent:+.3f} %, published {row['percent']} %")
    assert 0 <= percent - row["percent"] < 0.1  # the sources truncate instead of rounding

# %% [markdown]
# ## Recomputed: TFLOPS of the model or of the hardware?
#
# A matrix of a layer is used once per token in the forward pass, with a multiplication and an
# addition per parameter: $2P$. The backward pass computes the gradients of the inputs and of the
# weights: $4P$. Activation checkpointing repeats the forward pass during the backward pass: another
# $2P$. A token thus costs $6P$ operations of the *model* and $8P$ of the *hardware*, plus
# attention, which costs $12 L h s$ of the model's operations (source: Chowdhery et al., "PaLM",
# arXiv 2204.02311, appendix B).
#
# This can be verified: PyTorch counts the operations of a real forward and backward pass.

# %%
L, h, vocabulary, s = 4, 128, 512, 64


def operations_per_token(recompute):
    """Count the operations of a small GPT-2; ``recompute`` selects the recomputed part."""
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    shape = {"n_layer": L, "n_embd": h, "n_head": 4, "vocab_size": vocabulary, "n_positions": s}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "eager"}
    model = GPT2LMHeadModel(GPT2Config(**shape, **off, **ends)).train()
    for block in model.transformer.h:
        if recompute is not None:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    ids = torch.randint(vocabulary, (2, s))
    early_stop = set_checkpoint_early_stop(recompute == "most")
    with early_stop, FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.logsumexp(-1).sum().backward()
    return counter.get_total_flops() / ids.numel()


blocks, head, attention = 12 * L * h**2, vocabulary * h, 12 * L * h * s
counted = {recompute: operations_per_token(recompute) for recompute in (None, "all", "most")}
print(f"no recompute              {counted[None]:>11,.0f}  = 6P + attention")
print(f"blocks recomputed         {counted['all']:>11,.0f}  = 8P + 4/3 attention, 6P in the head")
print(f"... but the last product  {counted['most']:>11,.0f}  = omitted by PyTorch by default")

assert counted[None] == 6 * (blocks + head) + attention
assert counted["all"] == 8 * blocks + 6 * head + attention * 4 / 3
assert counted["most"] == counted["all"] - 2 * L * 4 * h**2

# %% [markdown]
# Which of them did the source print? A speed of $v$ sequences per second gives the tokens per
# second and GPU, $vs/G$. The published TFLOPS are
#
# $$8\,P\,\frac{v\,s}{G}$$
#
# with all parameters counted, including embeddings, and without attention. They are hardware FLOPS.
# The *model FLOPS utilization*, MFU, is the share of the GPU's peak spent on operations of the
# model: $6P + 12Lhs$ per token. It is comparable across libraries, because additional recomputation
# raises hardware FLOPS without training more.


# %%
def gpt2_parameters(row):
    """Count blocks with biases, the last norm, tied token and position embeddings."""
    L, h = row["layers"], row["width"]
    return L * (12 * h**2 + 13 * h) + 2 * h + (row["vocabulary"] + row["sequence"]) * h


def recomputed(row, system):
    """Return tokens per second and GPU, hardware TFLOPS (8P), and MFU."""
    P, G = gpt2_parameters(row), row["nodes"] * per_node
    tokens = row[system]["value"] * row["sequence"] / G
    model = 6 * P + 12 * row["layers"] * row["width"] * row["sequence"]
    peak = published["gpu"]["peak_tflops"] * 1e12
    return tokens, 8 * P * tokens / 1e12, model * tokens / peak


described = [row for row in rows if "layers" in row]
lines = []
for row in described:
    for system in ("baseline", "faster"):
        tokens, tflops, mfu = recomputed(row, system)
        stated = row["tflops"] if system == "faster" else DASH
        step = row["batch"] / row[system]["value"]
        lines.append([setting(row), row[system]["system"], f"{tokens:.0f}", f"{step:.2f}", stated,
                      f"{tflops:.1f}", f"{100 * mfu:.1f} %"])  # fmt: skip
    assert round(100 * mfu, 1) == {512: 42.2, 2048: 35.5}[row["sequence"]]
    assert abs(tflops - row["tflops"]) < 0.05 + 0.5 * isinstance(row["tflops"], int)
    print(
        f"{row['model']}, sequence {row['sequence']}: P = {gpt2_parameters(row) / 1e9:.3f} billion"
    )
table(["setting", "system", "tokens/s/GPU", "s per step", "TFLOPS, published",
       "TFLOPS, recomputed", "MFU, recomputed"], lines)  # fmt: skip

# %% [markdown]
# The second source prints *model* TFLOPS and says that hardware TFLOPS are about 4/3 of them, which
# is $8P/6P$. Its 121.85 for a 13-billion Llama 2 and the first source's 141 for GPT-2 are therefore
# in different units; as shares of the peak they are 39 % and 35.5 %.
#
# ### Days and dollars
#
# Days are tokens over speed. Dollars are the saved hours times a price.

# %%
for row in described:
    day = row["faster"]["value"] * row["sequence"] * 86400
    found = {1e11: 1e11 / day, 5e11: 5e11 / day}
    print(f"sequence {row['sequence']}: {found[1e11]:.2f} and {found[5e11]:.2f} days")
    assert abs(found[1e11] - row["days_100b"]) < 0.01 and abs(found[5e11] - row["days_500b"]) < 0.01

row = described[-1]
slow, fast = (5e11 / row[name]["value"] / row["sequence"] for name in ("baseline", "faster"))
hours = (slow - fast) / 3600
price = row["saved_dollars"] / row["saved_hours"]
print(f"saved: {hours:.1f} hours, published as nearly {row['saved_hours']}; at {price:.1f} dollars "
      f"an hour they are the published {row['saved_dollars']:,}")  # fmt: skip
assert 0 < row["saved_hours"] - hours < 1

# %% [markdown]
# About 33 dollars an hour was the price of *one* of these instances, and the run occupies 32. By
# the source's own numbers the saving is 32 times as large as stated.
#
# ## The race on emulated clusters
#
# `python -m ci.benchmarks.compare.race` trains one small model with DDP, DeepSpeed, FSDP2 and
# nearlinear, each at several settings, from the same initial weights and on the same tokens. The
# cluster is emulated: every node has a NIC with a limited rate. The systems take turns, step by
# step, so that a disturbance of the machine affects all of them. Their losses must agree. The
# system `compute` does not communicate; no step can be shorter. A run is one cluster, link rate,
# model and number of micro-batches per step.

# %%
FOLDER = "ci/benchmarks/compare/results"
EXPECTED = {
    "race": f"python -m {race.MODULE} --json {FOLDER}/race.json",
    "scaling": comparisons.sweep_command(
        "--nodes 1 2 4 8 --rates 1gbit --scaled "
        "--systems compute ddp_nl fsdp2_once_nl ours_nl_once ours_nl_whole",
        "scaling",
    ),
    "rates": comparisons.sweep_command("--rates 300mbit 1gbit 3gbit", "rates"),
}
kept = comparisons.read_folder(Path(results) if results else comparisons.FOLDER)
missing = [name for name in EXPECTED if name not in kept]
if missing:
    print("Not measured yet. As root, on Linux, each is written by its command:")
    print(*(f"  {name:<8} {EXPECTED[name]}" for name in missing), sep="\n")
runs = {f"run {nth}": run for nth, run in enumerate(kept.get("race", []))}
if scale == "laptop":
    reason = cluster.unavailable_reason()
    if reason is None:
        made = work / "this machine.json"
        raced = systems or "compute ddp_nl fsdp2 fsdp2_nl ours_nl ours_nl_whole ours_nl_full_lean"
        words = ["--pareto", "--systems", *raced.split(), "--steps", "3", "--json", str(made)]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [sys.executable, "-m", "ci.benchmarks.compare", *words]
        with subprocess.Popen(command, cwd=repository, **pipe) as job:
            for line in job.stdout:
                print(line, end="")
        assert job.returncode == 0, "The comparison failed; its message is above."
        runs["this machine"] = comparisons.read_file(made)[0]
    else:
        print(f"No comparison on this machine: {reason}")


def title(name):
    return SYSTEMS[name].title if name in SYSTEMS else name


def cluster_of(config):
    return (
        f"{config['nodes']} nodes x {config['ranks_per_node']} at {config['rate']}, "
        f"{config['model']}, {config['accumulation']} micro-batches"
    )


for name, run in runs.items():
    assert deviating_systems(run.records) == [], f"{name}: losses deviate"
display(
    table(
        ["run", "cluster, model, step", "systems", "timed steps"],
        [[n, cluster_of(r.config), len(r.names), r.config["steps"]] for n, r in runs.items()],
    )
)
for run in list(runs.values())[:1]:
    print("{cpu}, {cores} cores".format(**run.origin["machine"]), run.command, sep="\n")

# %% [markdown]
# ### Step time against memory
#
# A system that keeps the model gathered sends fewer bytes and needs more memory. A speed-up between
# systems of different memory therefore says little. The only fair form is: *the fastest system
# within a budget of memory*. The peak of a system is that of its allocated tensors over a whole
# step, in sizes of the float32 parameters. Plain data parallelism needs 4 of them for weights,
# gradients and AdamW's moments, before activations.
#
# A point on a front is a system that no other system of its kind beats in both time and memory.

# %%
stored = [{"config": run.config, "results": run.records} for run in runs.values()]
if stored:
    figure = report.plot_fronts(stored, race.OURS)
    cells = race.cells(stored)
    ahead = sum(cell.ratio >= 0.99 for cell in cells)
    behind = sum(cell.ratio < 0.99 for cell in cells)
    display(figure)
    display(
        Markdown(
            "*Peak memory over seconds per step, a panel per run, with the fronts of nearlinear "
            "and of the others. Within a budget, nearlinear is at least as fast as the fastest "
            f"other system (to 1 %) in {ahead} cells and slower in {behind}.*"
        )
    )
    display(Markdown(race.render(stored)))

# %% [markdown]
# Read a row as: within so much memory, the fastest setting of nearlinear, the fastest of all other
# systems, and their ratio. A small gloo-only ratio means that the sharding alone does not win
# there: on nearlinear's own backend the same schedule does, or DDP does on both.
#
# ## Composition of a step
#
# All systems perform the same computation. The time of a step beyond pure computation is spent
# waiting for the network, or on communication that uses the cores. This splits every bar and bounds
# every speed-up: **no system can be faster than `compute`**. The part left of the line cannot be
# saved by any library; the part right of it is the cost of data parallelism.

# %%
DRAWN = ("ddp", "ddp_nl", "zero1", "zero3", "fsdp2", "fsdp2_nl", "fsdp2_once_nl",
         "ours_nl_full_lean", "ours_nl", "ours_nl_once", "ours_nl_whole")  # fmt: skip
drawn = {name: run for name, run in runs.items() if "compute" in run.names}
if drawn:
    columns = min(2, len(drawn))
    lines = -(-len(drawn) // columns)
    size = (9.6, 2.9 * lines)
    fig, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    worst = 1.0
    for ax, (name, run) in zip(axes.flat, drawn.items(), strict=False):
        floor = run.seconds("compute").median
        order = [who for who in DRAWN[::-1] if who in run.names]
        spreads = [run.seconds(who) for who in order]
        medians = np.array([spread.median for spread in spreads])
        around = np.abs(np.array([spread[1:] for spread in spreads]).T - medians)
        names = [title(who) for who in order]
        ax.barh(names, np.minimum(medians, floor), color=PALETTE[0], label="computation")
        ax.barh(names, np.maximum(medians - floor, 0), left=floor, color=PALETTE[1],
                hatch=HATCHES[1], edgecolor="white", label="communication and waiting")  # fmt: skip
        ax.errorbar(medians, names, xerr=around, fmt="none", ecolor=INK, lw=1, capsize=2)
        ax.axvline(floor, color=MUTED, lw=1, ls="--")
        ax.set_title(f"{name}: {cluster_of(run.config)}", fontsize=8, color=INK)
        ax.tick_params(axis="y", labelsize=7)
        bare(ax, axis="x")
        worst = max(worst, medians.max() / floor)
        assert medians.min() > 0.9 * floor  # the bound holds, up to variations of the machine
    for ax in axes.flat[len(drawn) :]:
        ax.set_axis_off()
    fig.supxlabel("seconds per step: median, shortest and longest", fontsize=9)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=2,
               frameon=False, fontsize=9)  # fmt: skip
    show(
        alt=f"Seconds per step of several systems in {len(drawn)} runs, split into computation and "
        f"the rest. The slowest system takes {worst:.1f} times the computation; none is faster "
        "than computation alone."
    )
else:
    print("No run contains `compute`.")

# %% [markdown]
# ### At the memory of full sharding
#
# The published comparisons shard over all ranks and free the parameters after use. The next table
# repeats them at equal memory: the baseline is the fastest setting of ZeRO-3 or of FSDP2 with freed
# parameters, on either backend, and nearlinear has the fastest setting whose peak is at most the
# baseline's. Read a speed-up next to the upper bound of `compute`. The removed share of the waiting
# says more than the speed-up, because it does not grow by itself when the network gets slower.

# %%
BASELINES = {
    "ZeRO-3": ("zero3",),
    "FSDP": ("fsdp2", "fsdp2_nl", "fsdp2_ahead", "fsdp2_ahead_nl"),
}


def at_memory_of(run, baseline, candidates=race.OURS):
    """Return the fastest candidate whose peak is at most the baseline's to 0.1 %, or None."""
    return run.fastest(candidates, within=1.001 * run.peak(baseline))


lines = []
for name, run in drawn.items():
    for candidates in BASELINES.values():
        baseline = run.fastest(candidates)
        ours = at_memory_of(run, baseline) if baseline else None
        if ours is None:
            continue
        slow, fast, floor = (run.seconds(who).median for who in (baseline, ours, "compute"))
        removed = f"{100 * (slow - fast) / (slow - floor):.0f} %"
        lines.append([name, title(baseline), f"{run.peak(baseline):.2f} P", title(ours),
                      f"{run.peak(ours):.2f} P", run.speed_up(baseline, ours).show(),
                      f"{slow / floor:.2f}", removed])  # fmt: skip
        assert slow / fast < 1.1 * slow / floor
table(["run", "baseline", "peak", "nearlinear", "peak", "speed-up", "upper bound",
       "waiting removed"], lines)  # fmt: skip

# %% [markdown]
# ### The shares of the backend and of the schedule
#
# Gloo's reduce-scatter is an all-reduce and sends twice the necessary bytes (notebook 05), unlike
# any backend for GPUs. A part of the speed-up over any baseline on gloo is due to this. The same
# FSDP2 on this project's backend separates the two factors, whose product is the whole speed-up.
# The bytes are read from the NIC counters of the busiest node; they depend on no clock.

# %%
lines = []
for name, run in runs.items():
    if not {"fsdp2", "fsdp2_nl"} <= set(run.names):
        continue
    ours = at_memory_of(run, "fsdp2")
    if ours is None:
        continue
    backend, schedule = run.speed_up("fsdp2", "fsdp2_nl"), run.speed_up("fsdp2_nl", ours)
    whole = run.speed_up("fsdp2", ours)
    assert np.isclose(backend.median * schedule.median, whole.median)
    sent = [f"{run.sent_bytes(who) / 2**20:.0f}" for who in ("fsdp2", "fsdp2_nl", ours)]
    lines.append([name, title(ours), backend.show(), schedule.show(), whole.show(), *sent])
    if run.config["nodes"] > 1:
        assert run.sent_bytes("fsdp2_nl") < run.sent_bytes("fsdp2")
table(["run", "nearlinear", "backend: gloo to nearlinear", "schedule", "both", "MiB: FSDP2 on gloo",
       "FSDP2 on nearlinear", "nearlinear"], lines)  # fmt: skip

# %% [markdown]
# ## Side by side
#
# The two panels have separate axes, and the lengths of their bars must not be compared. The sign
# can be compared, and the order of the kinds of change.

# %%
COMPARISONS = {
    # comparison: baselines, of which the best counts, and systems, of which the best counts
    "MiCS over ZeRO-3": (BASELINES["ZeRO-3"], race.OURS),
    "MiCS over FSDP": (BASELINES["FSDP"], race.OURS),
    "collectives under FSDP": (("fsdp2",), ("fsdp2_nl",)),
    "collectives under ZeRO-3": (("zero3",), ("zero3_nl",)),
}
assert {row["compares"] for row in rows} <= COMPARISONS.keys()


def measured(comparison):
    """Return the speed-ups at the baseline's memory in the runs with a counterpart, by name."""
    candidates, systems = COMPARISONS[comparison]
    found = {}
    for name, run in runs.items():
        baseline = run.fastest(candidates)
        system = at_memory_of(run, baseline, systems) if baseline else None
        if system:
            found[name] = run.speed_up(baseline, system)
    return found


def hatch_of(name):
    return HATCHES[list(runs).index(name) % len(HATCHES)]


def colour_of(name):
    return PALETTE[list(runs).index(name) % len(PALETTE)]


fig, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4), layout="constrained")
labels = [f"{row['compares']}\n{row['model']}, sequence {row['sequence']}" for row in rows]
left.barh(labels[::-1], [row["percent"] for row in rows][::-1], color=MUTED)
left.tick_params(axis="y", labelsize=8)
left.set(title="published: clusters of GPUs", xlabel="speed-up, %")
for place, comparison in enumerate(reversed(COMPARISONS)):
    found = measured(comparison)
    for nth, (name, spread) in enumerate(found.items()):
        height = 0.8 / len(found)
        y = place + 0.4 - height * (nth + 0.5)
        around = [[spread.median - spread.low], [spread.high - spread.median]]
        right.barh(y, 100 * (spread.median - 1), height * 0.9, color=colour_of(name),
                   hatch=hatch_of(name), edgecolor="white")  # fmt: skip
        right.errorbar(100 * (spread.median - 1), y, xerr=100 * np.array(around), color=INK, lw=1,
                       capsize=2)  # fmt: skip
right.set_yticks(range(len(COMPARISONS)), list(reversed(COMPARISONS)), fontsize=8)
right.set(title="measured here: emulated nodes", xlabel="speed-up, %")
if runs:
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=colour_of(name), hatch=hatch_of(name),
                             edgecolor="white") for name in runs]  # fmt: skip
    fig.legend(handles, list(runs), loc="outside lower center", ncols=6, frameon=False,
               fontsize=8)  # fmt: skip
for ax in (left, right):
    ax.title.set_fontsize(10)
    bare(ax, axis="x")
show(
    alt="Left: published speed-ups on clusters of GPUs, "
    f"{min(row['percent'] for row in rows):.0f} to {max(row['percent'] for row in rows):.0f} %. "
    "Right: speed-ups measured on emulated nodes for the same kinds of change, at equal memory."
)

# %% [markdown]
# ## Scaling
#
# Near-linear scaling means: on $n$ nodes nearly $n$ times as fast as on one. An emulated cluster
# cannot show this directly, because all nodes share the cores of one machine, and $n$ times the
# work takes $n$ times as long even without a network. The figure therefore shows the computing
# share of a step: the seconds of `compute` on $n$ nodes over the seconds of the system on $n$
# nodes, with links that are slowed by as much as computation is. On a real cluster, where every
# node has its own cores and links, this share *is* the weak-scaling efficiency.

# %%
SHOWN = ("zero3", "ddp_nl", "fsdp2", "fsdp2_nl", "fsdp2_once_nl", "ours", "ours_nl", "ours_nl_once",
         "ours_nl_whole")  # fmt: skip


def draw_series(found, x_of, label):
    """Draw the efficiency of the systems in a series of comparisons."""
    fig, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
    shown = [name for name in SHOWN if all(name in run.names for run in found)]
    x = [x_of(run.config) for run in found]
    for number, who in enumerate(shown):
        colour, marker = (*LINES, PALETTE[5])[number], MARKERS[number % len(MARKERS)]
        spreads = np.array([run.efficiency(who) for run in found])
        ax.plot(x, 100 * spreads[:, 0], marker=marker, ms=5, mec=INK, mew=0.5, color=colour,
                label=title(who))  # fmt: skip
        ax.fill_between(x, 100 * spreads[:, 1], 100 * spreads[:, 2], color=colour, alpha=0.12, lw=0)
    ax.set_xscale("log", base=2)
    ax.set_xticks(x, [f"{value:g}" for value in x])
    ax.set(xlabel=label, ylabel="computing share of a step, %", ylim=(0, 105))
    bare(ax)
    ax.legend(frameon=False, fontsize=8)
    first, last = (100 * run.efficiency(shown[-1])[0] for run in (found[0], found[-1]))
    show(
        alt=f"Computing share of a step over {label} for {len(shown)} systems. {title(shown[-1])} "
        f"has {first:.0f} % at {x[0]:g} and {last:.0f} % at {x[-1]:g}; bands show the spread."
    )


if "scaling" in kept:
    draw_series(kept["scaling"], lambda config: config["nodes"], "nodes")
    print(f"printed by: {kept['scaling'][0].command}")
else:
    print(f"not measured yet: {EXPECTED['scaling']}")

# %% [markdown]
# The other axis is the link rate. A fast enough network makes all libraries equal. A slow enough
# one makes any speed-up large, up to the ratio of the bytes sent. A speed-up "of up to" some factor
# therefore says little without the network on which it was measured.

# %%
if "rates" in kept:
    gigabits = lambda config: parse_rate(config["rate"]) / 1e9  # noqa: E731
    draw_series(kept["rates"], gigabits, "Gbit/s of each NIC")
    print(f"printed by: {kept['rates'][0].command}")
else:
    print(f"not measured yet: {EXPECTED['rates']}")

# %% [markdown]
# ## The tables
#
# The first table has the rows that compare two systems. *Measured here* is the speed-up in every
# run with a counterpart, at the memory of its baseline: the ratio of the medians, with the smallest
# and the largest ratio of any round. *Modelled* is the planner's speed-up, or a dash if the cluster
# or the micro-batch was not published.

# %%
scored = [each for each in validate.validate().scored if each.run.source.startswith("AWS")]
SYSTEMS = {"SMP": "SMP", "DeepSpeed": "DeepSpeed", "FSDP, NCCL": "NCCL", "FSDP, SMDDP": "SMDDP"}


def modelled(row, system):
    """Predict the speed of a published system in the row's unit; None if not modelled."""
    words = next((w for s, w in SYSTEMS.items() if row[system]["system"].startswith(s)), None)
    for each in scored:
        values = each.run.row.values
        same = (int(values["gpus"]), int(values["seq"])) == (row.get("nodes", 0) * per_node,
                                                             row["sequence"])  # fmt: skip
        if same and words and words in values["note"] and "value" in row[system]:
            return row[system]["value"] * each.run.value / each.predicted
    return None


def modelled_gain(row):
    """Predict the speed-up of one system over the other."""
    slow, fast = modelled(row, "baseline"), modelled(row, "faster")
    return f"{fast / slow - 1:.1%}" if slow and fast else DASH


def shown(value, digits=1):
    return DASH if value is None else f"{value:.{digits}f}"


def cell(comparison):
    return "<br>".join(f"{name}: {s.show()} x" for name, s in measured(comparison).items()) or DASH


display(
    table(
        ["comparison", "published on", "published", "measured here", "modelled"],
        [
            [
                row["compares"],
                f"{setting(row)} ({row['source']})",
                f"{row['percent']} %",
                cell(row["compares"]),
                modelled_gain(row),
            ]
            for row in rows
        ],
    )
)
if any(measured(row["compares"]) for row in rows):
    print("Measured here by these commands:")
    print(*dict.fromkeys(f"  {run.command}" for run in runs.values()), sep="\n")
else:
    print("Measured here: nothing yet. See “The race on emulated clusters” for the command.")

# %% [markdown]
# Two properties of these rows have no counterpart: tensor parallelism, of which the 65-billion row
# used a degree of 8 and the comparison none, and the sequence length, which the comparison keeps at
# 128.
#
# The next tables have the absolute numbers. Seconds on 2 cores say nothing about the TFLOPS of a
# GPU, so that no measurements appear. The last table has the statements of the MiCS paper. Scaling
# efficiency compares a large cluster with a small one; its counterpart is the efficiency above on
# the most nodes over the one on the fewest nodes with a network. "Up to 2.89 times" has no
# counterpart on purpose: the links of an emulated cluster can be arbitrarily slow.


# %%
def weak_scaling(contestant, smallest, largest):
    """Return the efficiency on the most nodes over that on the fewest."""
    return largest.efficiency(contestant).median / smallest.efficiency(contestant).median


lines = []
for row in rows:
    where = f"{setting(row)} ({row['source']})"
    for system in ("baseline", "faster"):
        value = row[system].get("value", DASH)
        name = f"{row[system]['system']}, {row['unit']}"
        lines.append([where, name, value, DASH, shown(modelled(row, system))])
    if "tflops" in row:
        what = f"{row['faster']['system']}, hardware TFLOPS/GPU"
        gain = modelled(row, "faster") / row["faster"]["value"]  # both follow from the speed
        lines.append([where, what, row["tflops"], DASH, shown(row["tflops"] * gain)])
        days = f"{row['faster']['system']}, days for 100 and 500 billion tokens"
        value = f"{row['days_100b']}, {row['days_500b']}"
        both = ", ".join(shown(row[key] / gain, 2) for key in ("days_100b", "days_500b"))
        lines.append([where, days, value, DASH, both])

largest = max(kept.get("scaling", []), key=lambda run: run.config["nodes"], default=None)
shares = {"": DASH, "scaling efficiency": DASH, "efficiency over ZeRO-3": DASH}
if largest:
    smallest = min((run for run in kept["scaling"] if run.config["nodes"] > 1),
                   key=lambda run: run.config["nodes"])  # fmt: skip
    on = f"{smallest.config['nodes']} to {largest.config['nodes']} nodes, {largest.config['rate']}"
    ours = weak_scaling(largest.fastest(("ours_nl_once", "ours_nl")), smallest, largest)
    shares["scaling efficiency"] = f"{100 * ours:.1f} %, {on}"
    baseline = largest.fastest(BASELINES["ZeRO-3"])
    if baseline:
        over = ours / weak_scaling(baseline, smallest, largest)
        shares["efficiency over ZeRO-3"] = f"{over:.2f} x, {on}"
for statement in published["statements"]:
    value = f"{statement['value']} {statement['unit']}"
    here = shares[statement["measures"]]
    lines.append([f"({statement['source']})", statement["what"], value, here, DASH])
display(table(["published on", "number", "published", "measured here", "modelled"], lines))
if largest:
    print(f"Measured here by: {largest.command}")

# %% [markdown]
# ## Conclusions from 2 cores about 32 nodes
#
# A comparison is meaningful if the network is as busy as on the published cluster. One number
# without units expresses this: the seconds that ZeRO-3's bytes need on a NIC, over the seconds of
# computation in a step. With $N$ nodes and $A$ micro-batches, two gathers and one reduce-scatter of
# each, and $e$ bytes per parameter, a NIC carries $3 A e P (N-1)/N$ bytes per step.
#
# The computing time of the published cluster is not known, but lies between the time at the GPU's
# peak and the whole step of the faster system. The number of micro-batches is not published either;
# the cell assumes one, the case with the fewest bytes.


# %%
def network_seconds(P, nodes, micro_batches, element, bits_per_second):
    return 3 * micro_batches * element * P * (nodes - 1) / nodes / (bits_per_second / 8)


row = described[-1]
P, G = gpt2_parameters(row), row["nodes"] * per_node
bytes_need = network_seconds(P, row["nodes"], 1, 2, published["instance"]["network_gbit"] * 1e9)
tokens = row["batch"] * row["sequence"] / G
shortest = 8 * P * tokens / (published["gpu"]["peak_tflops"] * 1e12)
longest = row["batch"] / row["faster"]["value"]
print(f"{setting(row)}: the network needs {bytes_need:.2f} s, computing {shortest:.1f} to "
      f"{longest:.1f} s; network over computing: {bytes_need / longest:.2f} to "
      f"{bytes_need / shortest:.2f}")  # fmt: skip
assert shortest < longest

for name, run in drawn.items():
    config = run.config
    blocks = config["layers"] * 12 * config["width"] ** 2
    P = blocks + (config["vocabulary"] + config["sequence"]) * config["width"]
    rate = parse_rate(config["rate"])
    bytes_need = network_seconds(P, config["nodes"], config["accumulation"], 4, rate)
    computes = run.seconds("compute").median
    print(f"{name}: the network needs {bytes_need:.2f} s, computing {computes:.2f} s; "
          f"network over computing: {bytes_need / computes:.2f}")  # fmt: skip

# %% [markdown]
# An emulated cluster on 2 cores can show
#
# - that all libraries compute the same losses;
# - the exact number of bytes that each sends over a NIC, by its counter;
# - the order of the systems by waiting time at one ratio of network to computation, and the largest
#   possible reduction;
# - the growth of the waiting time over a few nodes.
#
# It cannot show
#
# - TFLOPS, MFU, or any speed of a GPU;
# - the speed-up at another ratio: at the published one there is less waiting to remove;
# - the difference between NVLink within a node and the network between nodes, congestion in a real
#   switch, links with a delay, or 32 nodes;
# - the overlap of communication on GPUs: here communication takes cores away from computation,
#   there a few of a hundred multiprocessors;
# - activation recomputation, mixed precision, and layers of hundreds of megabytes: the compared
#   model is small, in float32, and keeps its activations.
#
# The comparison is evidence for a mechanism, with a sign and a bound. It does not predict a
# percentage on 256 GPUs; that is the purpose of the column *modelled*, and notebook 07 states its
# error.
#
# ## Summary
#
# - The published percentages, TFLOPS and days follow from the published speeds; the dollars are
#   those of one instance.
# - 141 and 173.6 TFLOPS are hardware FLOPS, $8P$ per token. In model FLOPS, attention included,
#   they are 35.5 % and 42.2 % of the peak.
# - Computation alone bounds a speed-up. The removed share of the waiting says more than the
#   speed-up, because it does not grow by itself when the network gets slower.
# - A speed-up means little without the memory of both systems. “Fastest within a budget” is fair.
# - A speed-up over a baseline on gloo is partly due to the backend. The same baseline on the same
#   backend separates the two.
# - Published, measured and modelled numbers stand in separate columns. A dash is an answer.
#
# ## Exercises
#
# 1. The 65-billion row trains with checkpointing. Compute its hardware TFLOPS per GPU, as its
#    source defines them, and its MFU.
# 2. From the speeds of the 30-billion rows: how many seconds per step did MiCS remove at sequence
#    2048? Which share of ZeRO-3's step waited for the network at least?
# 3. With `network_seconds` and the seconds of exercise 2: without any overlap, which share of 400
#    Gbit/s did ZeRO-3's bytes reach at most? Compare with the measurements of notebook 05.
# 4. In `gpt2_parameters`, count 2048 position embeddings in both rows. Which of the two published
#    TFLOPS no longer agrees, and what does that say about the model?
# 5. Compare two systems at another link rate: `python -m ci.benchmarks.compare --systems compute
#    fsdp2_nl ours_nl --rate 300mbit --json ci/benchmarks/compare/results/slow.json`. Then run this
#    notebook again. Which columns of the tables change, and which must not?
