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
# # Collectives: the communication of sharded training
#
# After this notebook you can explain all-gather and reduce-scatter, tell when a training step waits
# for them, read a figure of link utilization and name the bound of each curve, move a training
# script from gloo to `nearlinear` with two lines, and find the faulty rank when calls do not match.
#
# Sharded training consists of two collectives. Before a layer computes, *all-gather* assembles its
# parameters from the ranks' shards. After its backward pass, *reduce-scatter* adds the ranks'
# gradients and leaves each rank the sum for its shard. Everything below runs between real
# processes, and, if the machine allows it, on nodes of an emulated cluster.

# %% tags=["parameters"]
scale = "ci"  # ci: small clusters, seconds; laptop: the whole figure, minutes; cluster: on your own
nodes = 0  # nodes of the emulated cluster; 0: chosen by scale
ranks_per_node = ""  # such as "1 2 4 8"; empty: chosen by scale
rate = "200mbit"  # limit of each node's NIC per direction
sizes = ""  # bytes per node, such as "16K:4M:4"; empty: chosen by scale

# %%
import collections
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # ci, when Jupyter was started in this folder

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist

import ci
import nearlinear as nl
from ci.benchmarks.collectives.options import format_size
from ci.benchmarks.network import report as network_report
from ci.emulation import cluster
from nearlinear.plots import GRID, INK, LINES, MARKERS, PALETTE, show, text_on

assert scale in ("ci", "laptop", "cluster"), f"scale = {scale!r}: use ci, laptop or cluster"
repository = Path(ci.__file__).resolve().parents[1]
keeper = tempfile.TemporaryDirectory(prefix="nearlinear-05-")  # removed when the kernel ends
work = Path(keeper.name)


def bare(ax):
    """Axes with a light grid and no box."""
    ax.grid(color=GRID, lw=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


# %% [markdown]
# ## The two in one picture
#
# A row is a rank's memory, a colour is one part of the model. An all-gather sends every rank's part
# to all ranks. A reduce-scatter sends every rank's share of each part to the owner of the part,
# where the shares are added.

# %%
fig, axes = plt.subplots(1, 4, figsize=(9.6, 2.5), layout="constrained")
titles = ["shards", "after all-gather", "each rank's gradients", "after reduce-scatter"]
for ax, title in zip(axes, titles, strict=True):
    for rank, part in np.ndindex(4, 4):
        whole = title in titles[1:3]
        if whole or part == rank:
            height = 0.8 if title != titles[2] else 0.35
            ax.add_patch(plt.Rectangle((part, -rank), 0.9, height, color=PALETTE[part]))
        if title == titles[3] and part == rank:
            ax.text(part + 0.45, 0.4 - rank, "sum", color=text_on(PALETTE[part]), ha="center",
                    va="center")  # fmt: skip
    ax.set(xlim=(-0.1, 4), ylim=(-3.2, 1), xticks=[], yticks=[])
    ax.set_title(title, fontsize=10, color=INK)
    ax.spines[:].set_visible(False)
axes[0].set_yticks([0.4 - rank for rank in range(4)], [f"rank {rank}" for rank in range(4)])
axes[0].tick_params(length=0)
show(
    alt="Memory of four ranks in four panels: each rank holds one shard; after an all-gather each "
    "holds all four; each has gradients of all four; after a reduce-scatter each holds the sum of "
    "one."
)

# %% [markdown]
# ## Notation
#
# | symbol | meaning | here |
# |:--|:--|:--|
# | $N$ | nodes, each with one NIC | `nodes` |
# | $M$ | ranks per node | `ranks_per_node` |
# | $P = N M$ | ranks | |
# | $s$ | bytes that a node contributes to an all-gather | `sizes` |
# | $S = N s$ | bytes of its output, on every rank | |
# | $B$ | bytes per second that a NIC carries, each way | `rate` |
# | $\alpha$ | fixed cost of a message in seconds | fitted below |
# | $F$ | floating-point operations per second of a node's ranks together | |
# | $t$ | tokens that a node processes between two gathers of a layer | |

# %% [markdown]
# ## On four real ranks
#
# `nl.spmd.run` with `processes=True` starts processes that communicate through `torch.distributed`.
# Each contributes two numbers to the all-gather and eight to the reduce-scatter. Sums of integers
# are exact, so that the results must be equal, not close.


# %%
def both(rank):
    mine = torch.tensor([10 * rank, 10 * rank + 1])
    gathered = torch.empty(8, dtype=torch.long)
    dist.all_gather_single(gathered, mine)

    gradients = torch.arange(8) + 100 * rank
    summed = torch.empty(2, dtype=torch.long)
    dist.reduce_scatter_single(summed, gradients)

    everywhere = gradients.clone()
    dist.all_reduce(everywhere)
    rebuilt = torch.empty(8, dtype=torch.long)
    dist.all_gather_single(rebuilt, summed)
    return gathered, summed, torch.equal(rebuilt, everywhere)


results = nl.spmd.run(both, ranks=4, processes=True)
inputs = torch.stack([torch.arange(8) + 100 * rank for rank in range(4)])
for rank, (gathered, summed, same) in enumerate(results):
    print(f"rank {rank}: gathered {gathered.tolist()}, reduced and kept {summed.tolist()}")
    assert gathered.tolist() == [0, 1, 10, 11, 20, 21, 30, 31]
    assert torch.equal(summed, inputs.sum(0)[2 * rank : 2 * rank + 2])
    assert same  # an all-reduce is a reduce-scatter and then an all-gather

# %% [markdown]
# ## A lower bound on time
#
# In an all-gather a node lacks the data of the other nodes, $(N-1)s$ bytes, and its NIC must
# receive them. No algorithm is faster than $(N-1)s/B$. The link utilization of a collective is this
# time divided by the measured time.
#
# The usual algorithm is a ring: each rank forwards the part it received last to its neighbour, in
# $P-1$ consecutive steps, each with its own $\alpha$. The alternative is one hop: every part is
# sent to all ranks at once, and since no message waits for another, $\alpha$ counts once:
#
# $$T_\text{ring} = (P-1)\left(\alpha + \frac{S/P}{B}\right) \qquad
# T_\text{one hop} = \alpha + \frac{(N-1)\,s}{B}$$
#
# For large outputs both algorithms reach the same rate. For small ones the ring pays for its steps.
# It reaches half of the link rate only at $S = P\,\alpha B$, which grows with the number of ranks;
# one hop reaches it at $S = \frac{N}{N-1}\,\alpha B$, which does not.


# %%
def ring_seconds(S, P, alpha, B):
    return (P - 1) * (alpha + S / P / B)


def one_hop_seconds(S, N, alpha, B):
    return alpha + S * (N - 1) / N / B


def needed_seconds(S, N, B):
    return S * (N - 1) / N / B


B, alpha = 50e9, 20e-6  # a 400 Gbit/s NIC, and a plausible message cost
S = np.geomspace(1e4, 1e10, 200)
fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
for P, colour, style in ((8, LINES[2], ":"), (32, LINES[1], "-."), (128, INK, "--")):
    ax.plot(S, 100 * needed_seconds(S, P, B) / ring_seconds(S, P, alpha, B), color=colour,
            ls=style, label=f"ring of {P} nodes")  # fmt: skip
    half = P * alpha * B
    assert np.isclose(needed_seconds(half, P, B) / ring_seconds(half, P, alpha, B), 0.5)
ax.plot(S, 100 * needed_seconds(S, 128, B) / one_hop_seconds(S, 128, alpha, B), color=PALETTE[0],
        label="one hop, 128 nodes")  # fmt: skip
ax.set(xscale="log", xlabel="output, bytes", ylabel="link utilization, %")
bare(ax)
ax.legend(frameon=False)
show(
    alt="Link utilization over the output size for rings of 8, 32 and 128 nodes and for one hop. A "
    "ring of 128 nodes reaches half of the link only at 128 MB of output; one hop at 1 MB."
)
print(f"half of the link: ring of 128 from {128 * alpha * B / 1e6:.0f} MB of output, "
      f"one hop from {128 / 127 * alpha * B / 1e6:.1f} MB")  # fmt: skip

# %% [markdown]
# A layer of a 13-billion-parameter model in bfloat16 is 600 MB, but a bucket, a smaller model or a
# wider tensor-parallel group gives outputs of a few MB. At these sizes rings waste the network.
#
# ## Measured
#
# An emulated cluster needs Linux, root and iproute2. Each node is a set of namespaces with its own
# NIC, limited to `rate` in each direction. On an unsuitable machine the cell prints the reason and
# reads a measurement of the same command at a larger scale.
#
# Both backends run in the same processes in turn, and their results are verified. Ethernet, IP and
# TCP headers leave 95.5 % of the rate to data (the dashed line).

# %%
committed = repository / "packages/collectives/benchmarks/network.json"

if scale == "cluster":
    reason = (
        "On each of your nodes, for its real links:\n  torchrun --nnodes 4 --nproc-per-node 8 "
        "--rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500 -m ci.benchmarks.collectives "
        "--ops all_gather --sizes 64K:64M:4"
    )
else:
    reason = cluster.unavailable_reason()
if reason is None:
    # nodes, ranks per node, bytes per node, blocks
    planned = {
        "ci": (2, "1 2", "16K 128K 1M", "--blocks 2 --block-ms 60"),
        "laptop": (4, "1 2 4 8", "16K:4M:4", "--blocks 5"),
    }[scale]
    made = work / "network.json"
    words = f"--nodes {nodes or planned[0]} --ranks {ranks_per_node or planned[1]} --rate {rate} "
    words += f"--sizes {sizes or planned[2]} {planned[3]} --json {made}"
    command = [sys.executable, "-m", "ci.benchmarks.network", *words.split()]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=repository, **pipe) as job:
        for line in job.stdout:
            print(line, end="")
    assert job.returncode == 0, "The benchmark failed; its message is above."
    record = json.loads(made.read_text())
else:
    record = json.loads(committed.read_text())
    print(f"{reason}\n\nRead from {committed.name}, which was written by\n  {record['command']}")

panels = len({entry["ranks_per_node"] for entry in record["results"]})
size = (8.8, 3.3 if panels <= 2 else 6)
network_report.draw(record, figure=plt.figure(figsize=size, layout="constrained"))
show(
    alt=f"Measured link utilization of an all-gather over {record['settings']['nodes']} nodes by "
    "output size, with a panel per number of ranks per node and a line per backend. A dashed line "
    "is the share that TCP headers leave to data."
)
assert not any(entry["wrong"] for entry in record["results"])  # all data was verified

# %% [markdown]
# The same figure for GPUs, 32 nodes and a 400 Gbit/s network motivated this library (source: AWS,
# "Enable faster training with Amazon SageMaker data parallel library", 2023). The important
# properties are the height of a curve, and the size at which it rises.
#
# ### The bounds of each curve
#
# We fit $T = a + b\,s$ to every curve. $a$ is the cost of a call before its first byte, the sum of
# its $\alpha$; $1/b$ is the asymptotic rate; at $s = a/b$ bytes per node the call runs at half of
# it. $T$ is taken from the best block, which is least disturbed by other programs.


# %%
def measured(contender, per_node, operation="all_gather"):
    """Return bytes per node, seconds and records of one curve."""
    found = [
        entry
        for entry in record["results"]
        if (entry["contender"], entry["ranks_per_node"]) == (contender, per_node)
        and entry["operation"] == operation
    ]
    s = np.array([entry["bytes_per_node"] for entry in found], dtype=float)
    T = np.array([entry["min_us"] for entry in found]) / 1e6
    return s, T, found


def fit(s, T):
    """Fit a and b with the smallest relative errors."""
    (a, b), *_ = np.linalg.lstsq(np.stack([1 / T, s / T], axis=1), np.ones_like(s), rcond=None)
    return max(a, 0), b


def used_share(s, T):
    """Return link utilization in percent: necessary time over measured time."""
    return 100 * (N - 1) * s / B / T


N = record["settings"]["nodes"]
B = record["settings"]["rate_bits_per_second"] / 8
counts = sorted({entry["ranks_per_node"] for entry in record["results"]})
fits = {}
width = min(4.4 * len(counts), 11)
fig, axes = plt.subplots(1, len(counts), figsize=(width, 3), sharey=True,
                         squeeze=False, layout="constrained")  # fmt: skip
print("ranks per node   backend      a, ms    at best    half of it from")
for M, ax in zip(counts, axes[0], strict=True):
    for number, contender in enumerate(("nearlinear", "gloo")):
        colour, style = LINES[number], ("-", "--")[number]
        s, T, _ = measured(contender, M)
        a, b = fits[contender, M] = fit(s, T)
        smooth = np.geomspace(s.min(), s.max())
        ax.plot(s, used_share(s, T), MARKERS[number], color=colour)
        ax.plot(smooth, used_share(smooth, a + b * smooth), style, color=colour,
                label=contender)  # fmt: skip
        best = used_share(1, b)
        half = format_size(int(a / b))
        print(f"{M:>14}   {contender:<10} {1e3 * a:>7.2f}   {best:>6.1f} %    {half}")
    ax.set_xscale("log", base=2)
    ticks = s[:: -(-len(s) // 3)]
    ax.set_xticks(ticks, [format_size(int(size)) for size in ticks])
    ax.set_xticks([], minor=True)
    ax.set(title=f"{M} rank{'s' * (M > 1)} per node", xlabel="bytes per node", ylim=(0, 104))
    bare(ax)
axes[0, 0].set_ylabel("link utilization, %")
axes[0, 0].legend(frameon=False)
show(
    alt="Measured link utilization of nearlinear and gloo over the bytes per node, with curves "
    "fitted "
    "by a constant and a time per byte. The fits follow the points."
)

M = counts[-1]
assert fits["gloo", M][0] > fits["nearlinear", M][0]  # the ring's steps
first = {name: measured(name, M)[1][0] for name in ("gloo", "nearlinear")}
assert first["gloo"] > first["nearlinear"]  # and their cost at the smallest size

# %% [markdown]
# ## The sender of a node
#
# With several ranks per node, different ranks can send a node's data. Count how often a remote byte
# crosses a node's NIC, compared with once:
#
# - **A ring over all ranks** passes every block through every rank. $P-1$ blocks leave a node
#   although $P-M$ would suffice, because its own ranks' blocks travel through the ring too.
# - **Every rank to every rank** sends a block to each of the $M$ ranks of a node: $M$ times.
# - **One leader per NIC** fetches for the node, and its ranks share through memory: once.
#
# Gloo's all-gather is such a ring, and its reduce-scatter is an all-reduce with twice the bytes.
# The NIC counters confirm it at the largest size, where headers weigh least:

# %%
print("ranks per node      ring should     gloo sent     nearlinear sent")
for M in counts:
    ring = (N * M - 1) / (N * M - M)
    gloo, nearlinear = (measured(name, M)[2][-1] for name in ("gloo", "nearlinear"))
    sent = gloo["sent_over_necessary"], nearlinear["sent_over_necessary"]
    print(f"{M:>14} {ring:>16.2f} {sent[0]:>13.2f} {sent[1]:>19.2f}")
    assert abs(sent[0] / ring - 1) < 0.1
    assert sent[1] < 1.1

# %% [markdown]
# ## The order of destinations
#
# A leader has a message for every other node. If all leaders begin with node 0, they queue up in
# front of one NIC while the others idle. If each sends to all nodes at once, bursts collide at a
# switch port, its queue overflows, and TCP pauses before it retransmits the lost packets. In *shift
# order* node $i$ sends to $i+1$, then $i+2$, and so on: each node has exactly one sender as long as
# all nodes keep pace. Alternatively the *windows* (the bytes in flight of one stream) are so small
# that all of them fit into one queue; then no sender waits behind a busy receiver. The package
# sends pieces in shift order, with a window per destination equal to the capacity of an idle path.
#
# The simulation below models only these effects: per tick, a NIC sends one packet and a switch port
# delivers one. A port's queue holds 16 packets. A lost packet silences its stream for 200 ticks. A
# stream sends to one destination after the other, with up to `window` packets in flight.


# %%
def share_used(streams_of, packets=96, nodes=8, queue=16, window=8, silence=200, seed=0):
    """Simulate an all-to-all of ``packets`` per pair; return necessary over measured ticks.

    ``streams_of(node)`` is a list of destination orders, one for each stream of the node.
    """
    random = np.random.default_rng(seed)
    streams = []  # [order, left for the first, in flight, silent until, share of each] per node
    for node in range(nodes):
        orders = streams_of(node)
        share = packets * (nodes - 1) // sum(map(len, orders))
        late = int(random.integers(20))  # nodes start at different times
        streams.append([[list(order), share, 0, late, share] for order in orders])
    ports = [collections.deque() for _ in range(nodes)]
    tick = 0
    while any(order for own in streams for order, *_ in own):
        for own in streams:
            ready = [s for s in own if s[0] and s[1] and s[2] < window and s[3] <= tick]
            if not ready:
                continue
            stream = ready[random.integers(len(ready))]
            port = ports[stream[0][0]]
            if len(port) == queue:
                stream[3] = tick + silence
            else:
                port.append(stream)
                stream[1], stream[2] = stream[1] - 1, stream[2] + 1
        for port in ports:
            if port:
                stream = port.popleft()
                stream[2] -= 1
                if not stream[1] and not stream[2]:  # all packets of this destination have arrived
                    stream[0].pop(0)
                    stream[1] = stream[4]
        tick += 1
    return packets * (nodes - 1) / tick


def others(node, first=1):
    """Return the other seven nodes, starting from ``node + first``."""
    return [(node + 1 + (first - 1 + k) % 7) % 8 for k in range(7)]


used = {
    "all begin with node 0": share_used(lambda node: [sorted(others(node))]),
    "all at once, window 8": share_used(lambda node: [[other] for other in others(node)]),
    "four leaders per NIC, shift order": share_used(
        lambda node: [others(node, first) for first in (1, 2, 4, 6)]
    ),
    "one leader, shift order": share_used(lambda node: [others(node)]),
    "all at once, window 2": share_used(lambda node: [[other] for other in others(node)], window=2),
}
good = list(used)[-2:]
fig, ax = plt.subplots(figsize=(7, 2.2), layout="constrained")
colours = [PALETTE[0] if name in good else PALETTE[1] for name in used]
ax.barh(list(used), [100 * share for share in used.values()], color=colours)
ax.bar_label(ax.containers[0], fmt="%.0f %%", padding=2)
ax.set(xlabel="link utilization, %", xlim=(0, 110))
bare(ax)
show(
    alt="Simulated link utilization of five sending orders: "
    + ", ".join(f"{name}: {100 * share:.0f} %" for name, share in used.items())
    + "."
)

assert all(used[name] > 0.85 for name in good)
assert all(share < 0.75 for name, share in used.items() if name not in good)

# %% [markdown]
# ## When does a step wait for the network?
#
# A layer of $p$ parameters in bfloat16 is gathered as $2p$ bytes and takes $2p$ floating-point
# operations per token in the forward pass. A node thus performs $2pt$ operations for $2p$ bytes
# through its NIC: the *arithmetic intensity* of sharded training is $t$, the tokens that a node
# processes between two gathers. With overlapped gathers, the forward pass runs at
#
# $$\min\left(F,\; t\,B\,u\right)$$
#
# where $u$ is the link utilization of the gather. Left of $t = F/(B u)$ the step waits for the
# network, and every percent of $u$ is a percent of the step. Right of it, the step is bound by
# computation.

# %%
F, B = 8 * 156e12, 50e9  # a node of 8 GPUs at half of 312 TFLOP/s each, and 400 Gbit/s
t = np.geomspace(100, 1e6, 200)
fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
ridges = {}
styles = ((0.15, LINES[1], "s--"), (0.8, LINES[2], "^-."), (0.95, LINES[0], "o-"))
for u, colour, style in styles:
    ridges[u] = F / (B * u)
    ax.plot(t, np.minimum(F, t * B * u) / 1e12, style[1:], color=colour,
            label=f"{100 * u:.0f} % of the link")  # fmt: skip
    ax.plot(ridges[u], F / 1e12, style[0], color=colour)
ax.set(
    xscale="log",
    yscale="log",
    xlabel="tokens per node between two gathers",
    ylabel="TFLOP/s of a node",
)
bare(ax)
ax.legend(frameon=False)
show(
    alt="Rate of a node over the tokens between two gathers: it grows linearly up to a ridge "
    "and is "
    f"bound by computation beyond. The ridge is at {ridges[0.95]:,.0f} tokens with 95 % of the "
    f"link "
    f"and at {ridges[0.15]:,.0f} with 15 %."
)
for u, ridge in ridges.items():
    print(f"{100 * u:>3.0f} % of the link: waits below {ridge:>9,.0f} tokens per node")
assert np.isclose(ridges[0.15] / ridges[0.95], 0.95 / 0.15)  # inversely proportional to u

# %% [markdown]
# ## Two lines
#
# The import registers the backend, and `init_process_group` selects it. The rest of the script
# below is plain FSDP2. One launch with torchrun trains on gloo and then on `nearlinear`, from the
# same initial weights: the losses must be equal.
#
# The script also measures the speed of a step for an increasing number of tokens, which is the
# roofline above on this machine: communication goes through shared memory here, or through loopback
# sockets with gloo.

# %%
script = """
import collections, json, sys, time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import nearlinear_collectives                # line 1

WIDTH, LAYERS = 512, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x_TW):
        return x_TW + self.down(torch.relu(self.up(x_TW)))


def trainer(shared):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    if shared:
        nearlinear_collectives.use_in(model, dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x_TW):
        loss = (model(x_TW) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


found = {}
for backend in sys.argv[1:]:
    dist.init_process_group(backend)         # line 2: "nearlinear" where "gloo" was
    for shared in (False, True) if backend == "nearlinear" else (False,):
        step = trainer(shared)
        generator = torch.Generator().manual_seed(dist.get_rank())
        losses = [step(torch.randn(16, WIDTH, generator=generator)) for _ in range(5)]
        seen = nearlinear_collectives.trace()[-6 * LAYERS :]
        ways = collections.Counter((call["operation"], call["detail"]) for call in seen)
        seconds = {}
        for tokens in (1, 8, 64, 512):
            x_TW = torch.randn(tokens, WIDTH, generator=generator)
            times = []
            for _ in range(4 if tokens < 100 else 2):
                dist.barrier()
                start = time.perf_counter()
                step(x_TW)
                times.append(time.perf_counter() - start)
            seconds[tokens] = min(times)
        found[backend + "+shared" * shared] = {
            "losses": losses, "seconds": seconds, "ways": [[*way, n] for way, n in ways.items()]
        }
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
if rank == 0:
    print("result " + json.dumps(found))
"""
(work / "train.py").write_text(script)
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
words = [*torchrun, work / "train.py", "gloo", "nearlinear"]
job = subprocess.run(words, capture_output=True, text=True)
assert job.returncode == 0, job.stderr
(line,) = (line for line in job.stdout.splitlines() if line.startswith("result "))
runs = json.loads(line.removeprefix("result "))

print("losses of five steps")
for name, run in runs.items():
    print(f"  {name:<16}", " ".join(f"{loss:.6f}" for loss in run["losses"]))
    assert np.allclose(run["losses"], runs["gloo"]["losses"], rtol=1e-6, atol=0)

# %% [markdown]
# ### Memory from the backend
#
# The third row of losses comes from the same script with one more line:
# `nearlinear_collectives.use_in(model, group)`. FSDP2 then allocates communication buffers from the
# backend. A gathered layer exists once per node: every rank writes its shard in place and reads its
# neighbours' shards where they were written, so that gathering is only synchronization. Gradients
# lie in memory that the neighbours can read, and nothing is staged in between. Memory that is
# reused has no page faults.
#
# `nearlinear_collectives.trace()` shows the path of each call's bytes:

# %%
for name in ("nearlinear", "nearlinear+shared"):
    for operation, way, calls in runs[name]["ways"]:
        print(f"{name:<16} {calls:>3} x {operation:<14} {way}")
ways = {name: {way for _, way, _ in runs[name]["ways"]} for name in runs}
assert "staged" in ways["nearlinear"]  # through a buffer between the ranks
assert ways["nearlinear+shared"] == {"shared", "pulled"}

# %%
parameters = 3 * 8 * 512**2
fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
for number, (name, run) in enumerate(runs.items()):
    tokens = [int(count) for count in run["seconds"]]
    rates = [6 * parameters * int(n) / seconds / 1e9 for n, seconds in run["seconds"].items()]
    ax.plot(tokens, rates, marker=MARKERS[number], color=LINES[number], label=name)
ax.set(xscale="log", yscale="log", xlabel="tokens per rank and step", ylabel="GFLOP/s per rank")
bare(ax)
ax.legend(frameon=False)
show(
    alt="Measured rate per rank over the tokens per step. gloo is slowest; the distance to "
    "nearlinear, "
    "with and without shared memory, shrinks as the tokens grow."
)

# With one token a step is dominated by communication, where backends differ. With 512 tokens it
# mostly computes, and the backend matters less.
for tokens in ("1", "512"):
    gain = runs["gloo"]["seconds"][tokens] / runs["nearlinear+shared"]["seconds"][tokens]
    print(f"{tokens:>3} tokens: {gain:.1f} times gloo's speed")

# %% [markdown]
# ## When calls do not match
#
# The most common failure of collectives is a rank that takes another branch and calls a different
# operation. Most backends then hang until a timeout, or mix up the data. Here rank 1 calls another
# operation than the other ranks. Every rank immediately gets an error that names both calls, and
# the group rejects further calls.


# %%
def mismatch(rank):
    import nearlinear_collectives

    group = dist.new_group(backend="nearlinear")
    dist.all_reduce(torch.ones(1000), group=group)
    try:
        if rank == 1:
            dist.all_reduce(torch.ones(1000), group=group)
        else:
            dist.all_gather_single(torch.empty(3000), torch.ones(1000), group=group)
    except RuntimeError as error:
        return str(error), nearlinear_collectives.trace()
    return "no error", []


errors = nl.spmd.run(mismatch, ranks=3, processes=True)
for message, trace in errors:
    print(message, "\n")
    assert "all_gather #2" in message and "rank 1 called all_reduce #2" in message
    assert trace[-1]["state"] == "failed" and trace[-1]["detail"] in message

# %% [markdown]
# `trace()` returns the last operations of a process, also without a failure. After a hang, print it
# on every rank: the rank with a different last operation is the one to investigate.

# %%
message, trace = errors[0]
for call in trace:
    print(f"#{call['sequence']} {call['operation']:<11} {call['bytes']:>5} B {call['dtype']} "
          f"{call['state']:<7} {call['detail'][:60]}")  # fmt: skip
assert [call["state"] for call in trace] == ["done", "failed"]

# %% [markdown]
# ## Summary
#
# - Sharded training waits for all-gather and reduce-scatter. A node's NIC must carry $(N-1)s$
#   bytes; the time for this at the full rate, divided by the measured time, is the link utilization
#   of a backend.
# - A ring pays the $\alpha$ of $P-1$ messages and passes a node's own blocks over its NIC. One hop
#   with one leader per node pays few, and every byte crosses once.
# - Destinations in shift order, with few bytes in flight to each, keep every receiver busy and no
#   queue full.
# - The intensity of sharded training is the number of tokens between two gathers. Below $F/(Bu)$ it
#   waits for the network.
# - Two lines change the backend, one more lets FSDP2 gather into shared memory, and a mismatch
#   raises an error that names the ranks.
#
# ## Exercises
#
# 1. In the simulation set `queue=8`. Which `window` brings one leader in shift order back above 85
#    %? Which one achieves it for "all at once"? Why must the bound be per node and not per rank?
# 2. Draw $T_\text{ring}$ for 4 nodes with 8 ranks each into the measured figure, with the $\alpha$
#    from gloo's $a$ at one rank per node. Which effects does the model omit?
# 3. An all-reduce is a reduce-scatter and an all-gather. How many bytes must cross a NIC? Check
#    `necessary_bytes` in `ci.benchmarks.network.config`.
# 4. Gradient accumulation over $A$ micro-batches reduces once per step, but gathers $A$ times. How
#    does the arithmetic intensity of the reduce-scatter change with $A$?
# 5. In `mismatch` let rank 1 call the same operation with 999 elements, and then with another
#    dtype. Which words of the error change?
# 6. Run this notebook with `rate = "1gbit"`. Which curve moves right, and why?
