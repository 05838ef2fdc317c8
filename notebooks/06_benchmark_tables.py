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
# from the raw numbers, tell FLOPS of the hardware from FLOPS of the model, say how much faster
# anybody could be at all, and judge what a race on 2 cores says about 32 nodes of GPUs.
#
# The published numbers made the case for the libraries that this project succeeds: GPT-2 with 30
# billion parameters, 39.7 % faster than DeepSpeed ZeRO-3 on 256 GPUs. Here every one of them stands
# beside what this project measured, if it measured a counterpart, and nothing is filled in.

# %% tags=["parameters"]
scale = "ci"  # ci: reads the kept races; laptop: also races on this machine; cluster: as ci
contestants = ""  # of the race on this machine, such as "compute fsdp2 ours_nl"; empty: a choice
results = ""  # folder of kept races; empty: the project's own

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
from ci import cluster
from ci.benchmarks.network.plan import parse_rate
from ci.race import kept as races
from ci.race.contestants import ENTRIES
from ci.race.table import astray
from nearlinear.plan import validate
from nearlinear.plots import GRID, INK, MUTED, PALETTE

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
    """Markdown; a sentence where there are no rows."""
    if not rows:
        return Markdown("*Nothing measured yet.*")
    lines = [head, [":--"] * len(head), *rows]
    return Markdown("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines))


# %% [markdown]
# ## Three kinds of numbers
#
# - **Published**: a number as its source prints it. `published.toml` has them, with the sources.
# - **Measured here**: a ratio between contestants of one race on an emulated cluster, read from the
#   files of `ci/race/results`, each of which keeps the command that wrote it.
# - **Modelled**: what the planner predicts for the published system on the published cluster
#   (`nearlinear plan --validate`; notebook 07). Its parameters were fitted to these and 200 other
#   published runs, so a small error here is no proof: notebook 07 has the errors of sources that
#   were left out.
#
# They are never averaged, never divided by each other, and never drawn on one axis. A dash means:
# there is no such number. What we compute *from* published numbers is said to be recomputed.
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
# A speed-up is the ratio of two speeds, less one. The published percentages follow from the
# published speeds, though some digits were cut off: 24.476 % is printed as 24.40 %, and the text
# around the 30-billion table says 39.7 % where the table has 39.77 %. For the 10-billion model the
# source prints no second speed; the one it implies can be recomputed, and is no published number.

# %%
for row in rows:
    fast, slow = row["faster"]["value"], row["baseline"].get("value")
    if slow is None:
        print(f"{setting(row)}: {row['percent']} % imply a baseline of "
              f"{fast / (1 + row['percent'] / 100):.0f} {row['unit']}")  # fmt: skip
        continue
    percent = 100 * (fast / slow - 1)
    print(f"{setting(row)}: {fast} / {slow} is {percent:+.3f} %, published {row['percent']} %")
    assert 0 <= percent - row["percent"] < 0.1  # the sources cut off, they do not round up

# %% [markdown]
# ## Recomputed: TFLOPS, but of what?
#
# A matrix of a layer is used once per token in the forward pass, a multiplication and an addition
# per parameter: $2P$. The backward pass needs the gradients of the inputs and of the weights: $4P$.
# With activation checkpointing the forward pass is run again during the backward pass: another
# $2P$. So a token costs $6P$ operations that the *model* needs and $8P$ that the *hardware* does,
# besides attention, which costs $12 L h s$ of the model's (source: Chowdhery et al., "PaLM",
# arXiv 2204.02311, appendix B).
#
# We need not believe this. PyTorch counts the operations of a real forward and backward pass.

# %%
L, h, vocabulary, s = 4, 128, 512, 64


def operations_per_token(recompute):
    """Of a small GPT-2, counted. ``recompute``: of which part of its blocks, if of any."""
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
print(f"... but the last product  {counted['most']:>11,.0f}  = what PyTorch leaves out by default")

assert counted[None] == 6 * (blocks + head) + attention
assert counted["all"] == 8 * blocks + 6 * head + attention * 4 / 3
assert counted["most"] == counted["all"] - 2 * L * 4 * h**2

# %% [markdown]
# Which of them did the source print? From a speed of $v$ sequences per second follow the tokens per
# second and GPU, $vs/G$. The published TFLOPS are
#
# $$8\,P\,\frac{v\,s}{G}$$
#
# with all parameters counted, embeddings too, and attention left out. They are hardware FLOPS. The
# *model FLOPS utilisation*, MFU, asks what share of the GPU's peak went into what the model needs:
# $6P + 12Lhs$ per token. It is the number to compare across libraries, for recomputing more raises
# the hardware's FLOPS and trains nothing.


# %%
def gpt2_parameters(row):
    """Weights and biases of the blocks, the last norm, tied token and position embeddings."""
    L, h = row["layers"], row["width"]
    return L * (12 * h**2 + 13 * h) + 2 * h + (row["vocabulary"] + row["sequence"]) * h


def recomputed(row, system):
    """Tokens per second and GPU, TFLOPS of the hardware (8P), and model FLOPS utilisation."""
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
# is $8P/6P$. So its 121.85 for a 13-billion Llama 2 and the first source's 141 for GPT-2 are not in
# the same unit, and as shares of the peak they are 39 % and 35.5 %.
#
# ### Days and dollars
#
# Days are tokens over speed. The dollars are the hours saved, priced.

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
# the source's own numbers the saving is 32 times as large as it says.
#
# ## The race
#
# `python -m ci.race` trains one small GPT-2, from the same numbers and on the same tokens, with
# this project and with DeepSpeed and FSDP, on an emulated cluster: every node has a NIC of its own
# with a limited rate. All contestants live at once and take turns step by step, so what disturbs
# the machine meets all. Their losses must agree. One of them only computes: no step is shorter.

# %%
OURS = "ours_nl"  # of this project's contestants: its defaults, on its own backend
EXPECTED = {
    **{layout: races.command_for(layout) for layout in ("4x1", "2x2", "4x2")},  # nodes x ranks
    "scaling": races.sweep_for("--nodes 1 2 4 8 --rates 1500mbit", "scaling"),
    "rates": races.sweep_for("--rates 300mbit 1gbit 3gbit", "rates"),
}
kept = races.read(Path(results) if results else races.FOLDER)
if scale == "laptop":
    reason = cluster.why_not()
    if reason is None:
        made = work / "this machine.json"
        raced = contestants or "compute fsdp1 fsdp2 fsdp2_nl ours ours_nl"
        words = ["--contestants", *raced.split(), "--steps", "3", "--json", str(made)]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [sys.executable, "-m", "ci.race", *words]
        with subprocess.Popen(command, cwd=repository, **pipe) as job:
            for line in job.stdout:
                print(line, end="")
        assert job.returncode == 0, "the race failed; its message is above"
        kept = {"this machine": races.races_of(made), **kept}
    else:
        print(f"No race on this machine: {reason}")
missing = [name for name in EXPECTED if name not in kept]
if missing:
    print("Not measured yet. As root, on Linux, each is written by its command:")
    print(*(f"  {name:<8} {EXPECTED[name]}" for name in missing), sep="\n")
kept = dict(sorted(kept.items(), key=lambda item: (*EXPECTED, item[0]).index(item[0])))
single = {name: found[0] for name, found in kept.items() if len(found) == 1}
series = {name: found for name, found in kept.items() if len(found) > 1}


def title(name):
    return ENTRIES[name].title if name in ENTRIES else name


def cluster_of(plan):
    layout = f"{plan['nodes']} nodes x {plan['ranks_per_node']}"
    return f"{layout} at {plan['rate']}, shard groups of {plan['shard']}"


for name, found in kept.items():
    for race in found:
        assert astray(race.turns) == [], f"{name}: some contestant trains something else"
table(
    ["race", "cluster", "contestants", "timed steps", "command", "on"],
    [
        [
            name,
            "<br>".join(cluster_of(race.plan) for race in found),
            len(found[0].names),
            found[0].plan["steps"],
            f"`{found[0].command}`",
            "{cpu}, {cores} cores".format(**found[0].origin["machine"]),
        ]
        for name, found in kept.items()
    ],
)

# %% [markdown]
# A step's seconds are the median over the timed steps, with the shortest and the longest beside it.
# The bytes are what the NICs' own counters say of the busiest node. They depend on no clock, and
# they are what MiCS is about: it must send less than full sharding does, on the same backend.

# %%
lines = []
for name, race in single.items():
    for who in race.names:
        mib = race.sent_bytes(who) / 2**20
        lines.append([name, title(who), race.seconds(who).show(), f"{mib:.1f}"])
    if race.plan["nodes"] > 1 and {"fsdp2", "fsdp2_nl", OURS} <= set(race.names):
        assert race.sent_bytes(OURS) < race.sent_bytes("fsdp2_nl") < race.sent_bytes("fsdp2")
table(["race", "contestant", "s per step", "MiB per NIC and step"], lines)

# %% [markdown]
# ## Where a step's time goes
#
# Everybody computes the same. What a step takes longer than computing alone is time in which it
# waits for the network, or in which communication takes the cores away. This splits every bar, and
# it bounds every speed-up: **nobody can be faster than `compute`**. Left of the line is what no
# library can save, right of it what sharding costs.

# %%
drawn = {name: race for name, race in single.items() if "compute" in race.names}
if drawn:
    tallest = max(len(race.names) for race in drawn.values())
    size = (8.8, (0.27 * tallest + 0.9) * len(drawn))
    fig, axes = plt.subplots(len(drawn), 1, figsize=size, squeeze=False, layout="constrained")
    for ax, (name, race) in zip(axes[:, 0], drawn.items(), strict=True):
        floor = race.seconds("compute").median
        names = race.names[::-1]
        spreads = [race.seconds(who) for who in names]
        medians = np.array([spread.median for spread in spreads])
        around = np.abs(np.array([spread[1:] for spread in spreads]).T - medians)
        ax.barh(names, np.minimum(medians, floor), color=PALETTE[0], label="computes")
        ax.barh(names, np.maximum(medians - floor, 0), left=floor, color=PALETTE[1],
                label="communicates and waits")  # fmt: skip
        ax.errorbar(medians, names, xerr=around, fmt="none", ecolor=INK, lw=1, capsize=2)
        ax.axvline(floor, color=MUTED, lw=1, ls="--")
        ax.set_title(f"{name}: {cluster_of(race.plan)}", fontsize=10, color=INK)
        bare(ax, axis="x")
        assert medians.min() > 0.9 * floor  # the bound holds, within what the machine varies
    axes[-1, 0].set_xlabel("seconds per step: median, shortest and longest")
    axes[0, 0].legend(frameon=False, fontsize=9)
    plt.show()
else:
    print("no race with `compute` in it was kept")

# %% [markdown]
# So a speed-up over a baseline should be read beside the one that nobody can exceed, and the share
# of the waiting that went away says more than the speed-up: it does not grow by itself when the
# network gets slower.
#
# For the baseline we take the faster one of what there is, as the published table did when it chose
# the best of DeepSpeed's configurations.

# %%
BASELINES = {"ZeRO-3": ("zero3", "zero3_default"), "FSDP": ("fsdp1", "fsdp2")}
lines = []
for name, race in drawn.items():
    for of, candidates in BASELINES.items():
        baseline = race.fastest(candidates)
        if baseline is None or OURS not in race.names:
            continue
        slow, fast, floor = (race.seconds(who).median for who in (baseline, OURS, "compute"))
        removed = f"{100 * (slow - fast) / (slow - floor):.0f} %"
        lines.append([name, of, title(baseline), race.speed_up(baseline, OURS).show(),
                      f"{slow / floor:.2f}", removed])  # fmt: skip
        assert slow / fast < 1.1 * slow / floor
table(["race", "over", "which is", "speed-up", "at most possible", "of the waiting removed"], lines)

# %% [markdown]
# ### How much is the backend, how much is MiCS?
#
# Gloo's reduce-scatter is an all-reduce and sends twice the bytes that it must (notebook 05), which
# no backend for GPUs does. A part of the speed-up over any baseline on gloo is only that. The same
# FSDP2 on this project's backend separates them, for the two factors multiply to the whole.

# %%
lines = []
for name, race in single.items():
    if {"fsdp2", "fsdp2_nl", OURS} <= set(race.names):
        backend, mics = race.speed_up("fsdp2", "fsdp2_nl"), race.speed_up("fsdp2_nl", OURS)
        whole = race.speed_up("fsdp2", OURS)
        assert np.isclose(backend.median * mics.median, whole.median)
        lines.append([name, backend.show(), mics.show(), whole.show()])
table(["race", "backend: gloo to nearlinear", "sharding: full to MiCS", "both"], lines)

# %% [markdown]
# ## Side by side
#
# Two panels with an axis each: their bars must not be compared in length. What may be compared is
# the sign, and which kind of change matters more than which.

# %%
COMPARISONS = {
    # comparison: baselines, the best of which counts, and the contestant
    "MiCS over ZeRO-3": (BASELINES["ZeRO-3"], OURS),
    "MiCS over FSDP": (BASELINES["FSDP"], OURS),
    "collectives under FSDP": (("fsdp2",), "fsdp2_nl"),
    "collectives under ZeRO-3": (("zero3",), "zero3_nl"),
}
assert {row["compares"] for row in rows} <= COMPARISONS.keys()


def measured(comparison):
    """Speed-ups by race, of the races that have a counterpart."""
    candidates, contestant = COMPARISONS[comparison]
    found = {name: race.fastest(candidates) for name, race in single.items()}
    return {
        name: single[name].speed_up(baseline, contestant)
        for name, baseline in found.items()
        if baseline is not None and contestant in single[name].names
    }


def colour_of(race):
    return PALETTE[list(single).index(race) % len(PALETTE)]


fig, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4), layout="constrained")
labels = [f"{row['compares']}\n{row['model']}, sequence {row['sequence']}" for row in rows]
left.barh(labels[::-1], [row["percent"] for row in rows][::-1], color=MUTED)
left.tick_params(axis="y", labelsize=7)
left.set(title="published: clusters of GPUs", xlabel="speed-up, %")
for place, comparison in enumerate(reversed(COMPARISONS)):
    found = measured(comparison)
    for nth, (name, spread) in enumerate(found.items()):
        height = 0.8 / len(found)
        y = place + 0.4 - height * (nth + 0.5)
        around = [[spread.median - spread.low], [spread.high - spread.median]]
        right.barh(y, 100 * (spread.median - 1), height * 0.9, color=colour_of(name))
        right.errorbar(100 * (spread.median - 1), y, xerr=100 * np.array(around), color=INK, lw=1,
                       capsize=2)  # fmt: skip
right.set_yticks(range(len(COMPARISONS)), list(reversed(COMPARISONS)), fontsize=7)
right.set(title="measured here: emulated nodes", xlabel="speed-up, %")
if single:
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour_of(name)) for name in single]
    right.legend(handles, list(single), frameon=False, fontsize=7)
for ax in (left, right):
    ax.title.set_fontsize(10)
    bare(ax, axis="x")
plt.show()

# %% [markdown]
# ## Scaling
#
# Near-linear means: on $n$ nodes nearly $n$ times as fast as on one. On an emulated cluster this
# cannot be seen directly, for all nodes share the cores of one machine, and $n$ times the work
# takes $n$ times as long even without a network. So we ask what share of a step is spent computing:
# seconds of `compute` on $n$ nodes over seconds of the contestant on $n$ nodes. On a real cluster,
# where every node brings its own cores, computing takes as long on $n$ nodes as on one, and this
# share *is* the weak-scaling efficiency.

# %%
SHOWN = ("zero3", "fsdp2", "fsdp2_nl", "mics", "ours", "ours_nl")


def draw_series(found, of, label):
    """Efficiency of the contestants in a series of races."""
    fig, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
    shown = [name for name in SHOWN if all(name in race.names for race in found)]
    x = [of(race.plan) for race in found]
    for who, colour in zip(shown, PALETTE, strict=False):
        spreads = np.array([race.efficiency(who) for race in found])
        ax.plot(x, 100 * spreads[:, 0], "o-", ms=4, color=colour, label=title(who))
        ax.fill_between(x, 100 * spreads[:, 1], 100 * spreads[:, 2], color=colour, alpha=0.12, lw=0)
    ax.set_xscale("log", base=2)
    ax.set_xticks(x, [f"{value:g}" for value in x])
    ax.set(xlabel=label, ylabel="share of a step that computes, %", ylim=(0, 105))
    bare(ax)
    ax.legend(frameon=False, fontsize=8)
    plt.show()


if "scaling" in series:
    draw_series(series["scaling"], lambda plan: plan["nodes"], "nodes")
    print(f"printed by: {series['scaling'][0].command}")
else:
    print(f"not measured yet: {EXPECTED['scaling']}")

# %% [markdown]
# The other axis is the link. A fast enough network makes all libraries equal. A slow enough one
# makes any speed-up large, up to the ratio of the bytes they send. So a speed-up "of up to"
# something says little without the network it was measured on.

# %%
if "rates" in series:
    draw_series(series["rates"], lambda plan: parse_rate(plan["rate"]) / 1e9, "Gbit/s of each NIC")
    print(f"printed by: {series['rates'][0].command}")
else:
    print(f"not measured yet: {EXPECTED['rates']}")

# %% [markdown]
# ## The tables
#
# First the rows that compare two systems. *Measured here* has the speed-up in every race with a
# counterpart: the ratio of the medians, with the smallest and the largest of any round. *Modelled*
# is the planner's; it has a dash where the cluster or the micro-batch was not published.

# %%
scored = [each for each in validate.validate().scored if each.run.source.startswith("AWS")]
SYSTEMS = {"SMP": "SMP", "DeepSpeed": "DeepSpeed", "FSDP, NCCL": "NCCL", "FSDP, SMDDP": "SMDDP"}


def modelled(row, system):
    """Speed of the published system in the row's unit, by the planner; None where it cannot say."""
    words = next((w for s, w in SYSTEMS.items() if row[system]["system"].startswith(s)), None)
    for each in scored:
        values = each.run.row.values
        same = (int(values["gpus"]), int(values["seq"])) == (row.get("nodes", 0) * per_node,
                                                             row["sequence"])  # fmt: skip
        if same and words and words in values["note"] and "value" in row[system]:
            return row[system]["value"] * each.run.seconds / each.predicted
    return None


def modelled_gain(row):
    """The speed-up of one over the other, by the planner."""
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
    print("Measured here, each by its command:")
    print(*(f"  {name}: {race.command}" for name, race in single.items()), sep="\n")
else:
    print("Measured here: nothing yet. The commands are above, under “The race”.")

# %% [markdown]
# Two things in these rows have no counterpart: tensor parallelism, of which the 65-billion row used
# a degree of 8 and the race nothing, and the sequence length, which the race keeps at 128.
#
# Then the absolute numbers. Seconds on 2 cores say nothing about TFLOPS of a GPU, so nothing is
# measured here. Last the statements of the MiCS paper. Scaling efficiency compares a large cluster
# with a small one; here that is the efficiency above at the most nodes over the one at the fewest
# that have a network. "Up to 2.89 times" has no counterpart on purpose: on an emulated cluster the
# link can be made as slow as one likes.


# %%
def weak_scaling(contestant, smallest, largest):
    """Efficiency on the most nodes over efficiency on the fewest."""
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

largest = max(series.get("scaling", []), key=lambda race: race.plan["nodes"], default=None)
shares = {"": DASH, "scaling efficiency": DASH, "efficiency over ZeRO-3": DASH}
if largest:
    smallest = min((race for race in series["scaling"] if race.plan["nodes"] > 1),
                   key=lambda race: race.plan["nodes"])  # fmt: skip
    on = f"{smallest.plan['nodes']} to {largest.plan['nodes']} nodes, {largest.plan['rate']}"
    ours = weak_scaling(OURS, smallest, largest)
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
# ## What 2 cores can say about 32 nodes
#
# A race is comparable if the network is as busy as it was there. That can be put into one number
# without units: seconds that ZeRO-3's bytes need on a NIC, over seconds that a step computes. With
# $N$ nodes and $A$ micro-batches, two gathers and one reduce-scatter of each, and $e$ bytes per
# parameter, a NIC carries $3 A e P (N-1)/N$ bytes per step.
#
# For the published cluster the computing time is not known, but it lies between what the GPU's peak
# allows and the whole step of the faster system. The number of micro-batches is not published
# either; we take one, which is the case with the fewest bytes.


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

for name, race in drawn.items():
    plan = race.plan
    P = (plan["layers"] * 12 * plan["width"] + plan["vocabulary"] + plan["sequence"]) * plan[
        "width"
    ]
    rate = parse_rate(plan["rate"])
    bytes_need = network_seconds(P, plan["nodes"], plan["accumulation"], 4, rate)
    computes = race.seconds("compute").median
    print(f"{name}: the network needs {bytes_need:.2f} s, computing {computes:.2f} s; "
          f"network over computing: {bytes_need / computes:.2f}")  # fmt: skip

# %% [markdown]
# An emulated cluster on 2 cores can show
#
# - that all libraries compute the same losses;
# - how many bytes each sends over a NIC, exactly, for the NIC counts them;
# - who waits less, at one ratio of network to computing, and how much less anybody could wait;
# - how waiting grows with the number of nodes, for a few nodes.
#
# It cannot show
#
# - TFLOPS, MFU, or any speed of a GPU;
# - the speed-up at another ratio: at the published one there is less waiting to remove;
# - how NVLink inside a node compares with the network between nodes, nor congestion in a real
#   switch, nor links with a delay, nor 32 nodes;
# - how well communication overlaps on GPUs. Here it takes the cores away from computing, there it
#   takes a few of a hundred multiprocessors;
# - activation recompute, mixed precision, and layers of hundreds of megabytes: what races is small,
#   in float32, and keeps its activations.
#
# So the race is evidence for a mechanism, with a sign and a bound. It is no prediction of a
# percentage on 256 GPUs; that is what the column *modelled* is for, and notebook 07 says how far to
# trust it.
#
# ## Summary
#
# - The published percentages, TFLOPS and days follow from the published speeds; the dollars are
#   those of one instance.
# - 141 and 173.6 TFLOPS are hardware FLOPS, $8P$ per token. In model FLOPS, attention included,
#   they are 35.5 % and 42.2 % of the peak.
# - A speed-up is bounded by computing alone. The share of the waiting that is removed says more
#   than the speed-up, for it does not grow by itself when the network gets slower.
# - A speed-up over a baseline on gloo is partly the backend's. The same baseline on the same
#   backend tells how much.
# - Published, measured and modelled numbers stand in columns of their own. A dash is an answer.
#
# ## Exercises
#
# 1. The 65-billion row trains with checkpointing. What are its hardware TFLOPS per GPU, as its
#    source defines them, and what share of the peak is its MFU?
# 2. From the speeds of the 30-billion rows: how many seconds per step did MiCS remove at sequence
#    2048? Which share of ZeRO-3's step waited for the network at least?
# 3. With `network_seconds` and the seconds of exercise 2: if nothing overlapped, what share of
#    400 Gbit/s did ZeRO-3's bytes travel at, at most? Compare with what notebook 05 measures.
# 4. In `gpt2_parameters`, count 2048 position embeddings in both rows. Which of the two published
#    TFLOPS no longer agrees, and what does that tell of the model behind it?
# 5. Race two contestants at another rate, `python -m ci.race --contestants compute fsdp2_nl ours_nl
#    --rate 300mbit --json ci/race/results/slow.json`, and run this notebook again. Which columns of
#    the tables change, and which must not?
