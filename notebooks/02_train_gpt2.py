# %% [markdown]
# # Train GPT-2 with MiCS sharding
#
# After this notebook you can locate the shards of a 30-billion-parameter GPT-2 on their ranks,
# choose a shard degree and justify it, verify on your own machine that sharded training equals
# training in one process, and start the same training on 4 local ranks or on 256 GPUs.
#
# The subject is GPT-2 30B on 32 nodes of 8 GPUs. This machine runs a small GPT-2 through the same
# functions, with real sharding and real collectives between ranks; nothing is simulated.

# %% tags=["parameters"]
scale = "ci"  # ci: seconds on 2 cores; laptop: minutes; cluster: prints the 32-node launch
steps = 0  # optimizer steps of the training run; 0: chosen by scale

# %%
import json
import math
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # data_prep, when Jupyter was started in this folder

import matplotlib.pyplot as plt
import psutil
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, logging

import data_prep
import nearlinear as nl
from nearlinear import plots

assert scale in ("ci", "laptop", "cluster"), f"scale = {scale!r}: use ci, laptop or cluster"
logging.set_verbosity_error()  # of transformers
keeper = tempfile.TemporaryDirectory(prefix="nearlinear-02-")  # removed when the kernel ends
work = Path(keeper.name)

# %% [markdown]
# ## Placement of the model states
#
# Training with AdamW in mixed precision keeps 16 bytes per parameter: 4 of float32 weights, 8 of
# optimizer state, and up to 4 of gradients. For 30 billion parameters that is 480 GB, more than the
# memory of any one GPU. **MiCS** cuts these states into the smallest number of shards that fit: the
# ranks of one *shard group* hold one copy together, and the groups are *replicas* of each other.
#
# | symbol | meaning | in the picture |
# |---|---|---|
# | $P$ | parameters | |
# | $W$ | ranks (GPUs) | 8 |
# | $S$ | shard degree: ranks that hold one copy together | 4 |
# | $R = W / S$ | replicas | 2 |
# | $A$ | micro-batches per optimizer step | |
#
# A cell is a rank, a colour is a shard. Parameters are gathered along a row, within a replica. Only
# finished gradient sums travel down a column, between replicas.

# %%
mesh = nl.Mesh(replicate=2, shard=4, ranks_per_node=4)
plots.rank_map(mesh)
plots.show(
    alt="Eight ranks in two rows, one per replica, and four columns, one per shard. Ranks of a "
    "column hold the same shard: 0 and 4, 1 and 5, 2 and 6, 3 and 7."
)
print(mesh)

# %% [markdown]
# Why not shard over all ranks, as ZeRO-3 and FSDP do? Every layer is gathered twice per micro-batch
# from all ranks that hold a shard of it. A smaller group means fewer hops over shorter distances.
# Sharding wider than memory requires gains nothing.
#
# ## Pick a shard degree
#
# Choose the smallest degree that fits. A rule of thumb for nodes of 8 GPUs with 40 GB: one node for
# every 3 billion parameters, rounded up to a power of two (source: AWS, "Train gigantic models with
# near-linear scaling using sharded data parallelism", 2022).


# %%
def shard_degree(parameters: float, gpus_per_node: int = 8) -> int:
    """Apply the rule of thumb: one node per 3 billion parameters, next power of two."""
    nodes = math.ceil(parameters / 3e9)
    return 2 ** math.ceil(math.log2(nodes)) * gpus_per_node


parameters_30b = 12 * 48 * 7168**2 + 50257 * 7168  # layers x 12 width^2, and the embeddings
degree = shard_degree(parameters_30b)
cluster = nl.Mesh.from_config(nl.ParallelConfig(hybrid_shard_degree=degree), 256, ranks_per_node=8)
print(f"{parameters_30b / 1e9:.1f} billion parameters: shard degree {degree}\n")
print(cluster)

assert degree == 128 and (cluster.replicate, cluster.shard) == (2, 128)
assert cluster.nodes_spanned("shard") == 16  # a shard group fills 16 consecutive nodes

# %% [markdown]
# The figure shows the bytes of model states on each GPU by shard degree. The line is the memory of
# a 40 GB GPU; activations need room in addition to the states.

# %%
degrees = [8, 16, 32, 64, 128, 256]
states = [16 * parameters_30b / d / 2**30 for d in degrees]

fig, ax = plt.subplots(figsize=(7, 3), layout="constrained")
for d, size in zip(degrees, states, strict=True):
    chosen = d == degree
    ax.bar(
        str(d), size, color=plots.PALETTE[chosen], hatch=plots.HATCHES[chosen], edgecolor="white"
    )
ax.text(degrees.index(degree), states[degrees.index(degree)] + 1, "rule of thumb", ha="center")
ax.axhline(40, color=plots.MUTED, ls="--", lw=1)
ax.text(len(degrees) - 0.55, 41, "memory of a GPU", ha="right", color=plots.INK)
ax.set(xlabel="shard degree", ylabel="states per GPU, GiB", title="GPT-2 30B, 16 bytes/parameter")
ax.spines[["top", "right"]].set_visible(False)
plots.show(
    alt=f"Model states per GPU over the shard degree: {states[degrees.index(8)]:.0f} GiB at "
    f"degree 8 "
    "exceed the 40 GiB of a GPU; every doubling of the degree halves them."
)

assert states[degrees.index(8)] > 40 and states[degrees.index(128)] < 4

# %% [markdown]
# ## Shard a model, for real
#
# `nl.spmd.run` runs a function on N ranks of this machine. By default the ranks are threads: they
# start at once, and inside the function `torch.distributed` works as on a cluster. Two lines shard
# a Hugging Face model: `nl.init` lays out the ranks, `nl.shard` cuts the model.


# %%
def small_gpt2() -> GPT2LMHeadModel:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**shape, **off, bos_token_id=0, eos_token_id=0))


def held(rank):
    nl.init({"hybrid_shard_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):  # threads share one random generator
        model = small_gpt2()
    nl.shard(model)
    name, parameter = next(iter(model.named_parameters()))
    mine = sum(p.to_local().numel() for p in model.parameters())
    return mine, f"{name}: {tuple(parameter.to_local().shape)} of {tuple(parameter.shape)}"


total = sum(p.numel() for p in small_gpt2().parameters())
shares = nl.spmd.run(held, ranks=4)
for rank, (mine, example) in enumerate(shares):
    print(f"rank {rank} holds {mine:,} of {total:,} parameters   {example}")

assert all(mine == total // 2 for mine, _ in shares)  # 2 shards: half each, on both replicas

# %% [markdown]
# ## The same numbers as one process
#
# Sharding must not change the result. One process trains on a batch of 16 sequences; 4 ranks train
# on 4 sequences each, divided into 2 micro-batches. `nl.accumulate` yields the micro-batches and
# makes the gradient the mean over all tokens of all ranks.

# %%
STEPS, ROWS = 3, 16


def sequences(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 512, (ROWS, 32), generator=generator)


def one_process():
    torch.manual_seed(0)
    model, losses = small_gpt2(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for step in range(STEPS):
        ids = sequences(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def four_ranks(rank):
    mesh = nl.init({"hybrid_shard_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = small_gpt2()
    nl.shard(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True), []
    for step in range(STEPS):
        mine = sequences(step).chunk(mesh.data_ranks)[mesh.data_rank(rank)]
        micro_batches = [{"input_ids": ids, "labels": ids} for ids in mine.chunk(2)]
        mean = torch.zeros(1)
        for batch in nl.accumulate(model, micro_batches):
            loss = model(**batch).loss
            loss.backward()
            mean += loss.detach() / 2 / dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses, {name: p.full_tensor().detach() for name, p in model.named_parameters()}


reference_losses, reference = one_process()
losses, parameters = nl.spmd.run(four_ranks, ranks=4)[0]
difference = max((parameters[name] - value).abs().max().item() for name, value in reference.items())
for step, (a, b) in enumerate(zip(reference_losses, losses, strict=True), 1):
    print(f"step {step}: one process {a:.6f}, four ranks {b:.6f}")
print(f"largest difference of any parameter after {STEPS} steps: {difference:.1e}")

assert max(abs(a - b) for a, b in zip(reference_losses, losses, strict=True)) < 1e-5
assert difference < 1e-5

# %% [markdown]
# ## Two hops instead of one
#
# With several micro-batches per step there is a choice. *One hop*: reduce the gradients over all
# ranks after every micro-batch. *Two hops*: accumulate them within the shard group, and synchronize
# the replicas once, after the last micro-batch. Both give the same gradients, but only the second
# leaves the slow links between replicas idle for $A - 1$ of $A$ micro-batches.
#
# The next cell counts the collectives of $A = 4$ micro-batches. The model has 4 units (3 blocks and
# the rest), each reduced once per micro-batch. As few units as possible stay gathered, as for a
# model that fills memory (`sdp_max_live_parameters = 0`). There are still fewer than two gathers
# per unit: the first block and the rest of the model stay gathered from micro-batch to micro-batch,
# because they are needed next.

# %%
A = 4


def counted(rank, two_hop):
    nl.init({"hybrid_shard_degree": 2, "sdp_max_live_parameters": 0})
    with nl.spmd.one_at_a_time(seed=0):
        model = small_gpt2()
    nl.shard(model)
    micro_batches = [{"input_ids": s, "labels": s} for s in sequences(0)[: 2 * A].chunk(A)]
    calls = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    for batch in nl.accumulate(model, micro_batches, two_hop=two_hop):
        with nl.count_collectives() as counts:
            model(**batch).loss.backward()
        for kind in calls:
            calls[kind] += counts.calls[kind]
    return calls


one_hop = nl.spmd.run(counted, ranks=4, args=(False,))[0]
two_hop = nl.spmd.run(counted, ranks=4, args=(True,))[0]

fig, ax = plt.subplots(figsize=(7, 3), layout="constrained")
places = range(len(one_hop))
ax.bar([p - 0.2 for p in places], one_hop.values(), 0.38, label="one hop", color=plots.PALETTE[1],
       hatch=plots.HATCHES[1], edgecolor="white")  # fmt: skip
ax.bar([p + 0.2 for p in places], two_hop.values(), 0.38, label="two hops", color=plots.PALETTE[0])
ax.set_xticks(places, [kind.replace("_", "-") for kind in one_hop])
ax.set_ylabel(f"calls in {A} micro-batches")
ax.yaxis.get_major_locator().set_params(integer=True)
ax.spines[["top", "right"]].set_visible(False)
fig.legend(loc="outside upper right", ncols=2, frameon=False)
plots.show(
    alt="Calls per optimizer step: one and two hops gather and reduce-scatter equally often, "
    "but two "
    f"hops need {two_hop['all_reduce']} all-reduces instead of {one_hop['all_reduce']}."
)

assert one_hop == {"all_gather": 22, "reduce_scatter": 16, "all_reduce": 16}
assert two_hop == {"all_gather": 22, "reduce_scatter": 16, "all_reduce": 4}

# %% [markdown]
# An optimizer step before the last micro-batch would use incomplete gradients. Plain FSDP2 would
# take this step silently. nearlinear raises an error:


# %%
def too_early(rank):
    nl.init({"hybrid_shard_degree": 1})
    with nl.spmd.one_at_a_time(seed=0):
        model = small_gpt2()
    nl.shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = {"input_ids": sequences(0), "labels": sequences(0)}
    for micro_batch in nl.accumulate(model, [batch, batch]):
        model(**micro_batch).loss.backward()
        break
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)


message = nl.spmd.run(too_early, ranks=2)[0]
print(message)
assert "of 2 micro-batches" in message

# %% [markdown]
# ## Data
#
# Notebook 01 turns text into token shards. This notebook takes a part of the same corpus, with
# GPT-2's real vocabulary of 50,257 tokens.

# %%
documents = {"ci": 3000, "laptop": None, "cluster": 3000}[scale]
manifest = data_prep.prepare(
    data_prep.sources.botocore(), work / "tokens", max_documents=documents, val_fraction=0.05
)
dataset = nl.data.TokenDataset(work / "tokens", sequence_length=128)
print(dataset)
plots.document_lengths(dataset.document_lengths())
plots.show(
    alt="Histogram of tokens per document: most have between 30 and 500 tokens, with a median of "
    f"{sorted(dataset.document_lengths())[len(dataset.document_lengths()) // 2]}."
)
assert manifest.vocab_size == 50257

# %% [markdown]
# ## The same config at every scale
#
# A run is one TOML file. From a laptop to a cluster, only the model's name and a few numbers
# change; the keys stay. `nearlinear train FILE --print-config` lists all keys with their meaning.

# %%
SCALES = {
    # model, ranks, shard degree, sequence, micro-batch, micro-batches, steps, learning rate, bf16
    "ci": ("gpt2-tiny", 4, 2, 32, 1, 2, 16, 8e-3, False),
    "laptop": ("gpt2-tiny", 4, 2, 256, 2, 2, 200, 2e-3, False),
    "cluster": ("gpt2-30b", 256, degree, 2048, 6, 1, 1000, 1.2e-4, True),
}
name, ranks, shards, length, micro_batch, accumulation, planned, rate, bf16 = SCALES[scale]
steps = steps or planned
shrink = "overrides = { n_layer = 2, n_embd = 64, n_head = 4 }" if scale == "ci" else ""
config = f"""
[model]
preset = "{name}"
{shrink}

[data]
path = "{work / "tokens"}"
sequence_length = {length}

[parallel]
hybrid_shard_degree = {shards}
bf16 = {str(bf16).lower()}

[activations]
checkpoint = "{"each" if scale == "cluster" else ""}"
offload = {str(scale == "cluster").lower()}

[batch]
micro_batch_size = {micro_batch}
accumulation = {accumulation}

[optimizer]
lr = {rate}
warmup_steps = {max(10, steps // 100)}

[train]
steps = {steps}
eval_every = {max(1, steps // (2 if scale == "ci" else 4))}
eval_sequences = {8 if scale == "ci" else 64}
sample_prompt = "Returns the"
sample_tokens = {12 if scale == "ci" else 32}

[run]
folder = "{work / "run"}"
log_every = {max(1, steps // 20)}
"""
path = work / "run.toml"
path.write_text(config)
print(config)

# %% [markdown]
# ## Train
#
# On this machine `nearlinear train --nproc 4` starts four processes through torchrun's API. On 32
# nodes torchrun (or SageMaker, or Slurm) starts 8 on each, and they run the same command. The
# layout is validated against the number of ranks, and the data is verified, before any rank starts.

# %%
if scale == "cluster":
    launch = (
        "torchrun --nnodes 32 --nproc-per-node 8 --rdzv-backend c10d "
        f"--rdzv-endpoint $HEAD_NODE:29500 -m nearlinear.cli train {path.name}"
    )
    print("On each of 32 p4d nodes, with data.path and run.folder on shared storage:\n")
    print(launch)
    config = nl.ParallelConfig(hybrid_shard_degree=shards)
    layout = nl.Mesh.from_config(config, ranks, ranks_per_node=8)
    assert (layout.nodes, layout.shard, layout.replicate) == (32, 128, 2)
else:
    train = [sys.executable, "-m", "nearlinear.cli", "train", str(path), "--nproc", str(ranks)]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(train, **pipe) as job:
        for line in job.stdout:
            print(line, end="")
    assert job.returncode == 0, "The training run failed; its message is above."

# %% [markdown]
# The run's folder contains `metrics.jsonl`, TensorBoard events, the resolved config, and the
# position in the data. The dashed line is the loss of a uniform guess.

# %%
if scale != "cluster":
    metrics = plots.read_metrics(work / "run")
    plots.loss_curve(metrics, vocabulary=manifest.vocab_size)
    plots.show(
        alt=f"Training and held-out loss over {metrics[-1]['step']} steps fall from the level of "
        f"guessing, {math.log(manifest.vocab_size):.1f} nats, to {metrics[-1]['eval_loss']:.1f} "
        f"nats."
    )

    guessing = math.log(manifest.vocab_size)
    held_out = metrics[-1]["eval_loss"]
    print(f"held-out loss {held_out:.2f} nats; guessing is {guessing:.2f}")
    assert held_out < guessing - 2.5

# %% [markdown]
# ## A rank dies
#
# The more machines, the more often one fails. With `elastic.replicas`, the loss of a rank does not
# end the run. Each replica of the shard group then is a job of its own, and all of them agree after
# every step. If a rank dies, its replica ends. The other replica computes the batches of both until
# the lost one is started again and has copied the state.
#
# The run below is trained twice, on two replicas of two ranks. The second time, one of the four
# processes is killed after a few steps.


# %%
def train_replicas(name, kill_after=0):
    """Train on two replicas, kill a rank after step `kill_after`, and return the metrics."""
    settings = {
        "elastic.replicas": 2,
        "train.steps": 16 if scale == "ci" else 60,
        "train.sample_tokens": 0,
        "run.log_every": 1,
        "run.folder": work / name,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with subprocess.Popen([*train, *words], **pipe) as job:
        for line in job.stdout:
            step = re.match(r"step=(\d+) ", line)
            if step and int(step[1]) == kill_after:
                replica, *_ = psutil.Process(job.pid).children()
                victim = replica.children()[1]
                victim.kill()
                print(f"killed a rank of replica 0 after step {kill_after}")
            if not step and "replica" in line:
                print(line, end="")
    assert job.returncode == 0, "The training run failed."
    return plots.read_metrics(work / name)


if scale != "cluster":
    undisturbed = train_replicas("undisturbed")
    disturbed = train_replicas("disturbed", kill_after=5)

# %% [markdown]
# Are the results the same? The gradients of all replicas are added in a fixed order, and dropout
# depends on the replica and not on the process that computes it. Therefore the losses are equal to
# the last bit, not only similar.

# %%
if scale != "cluster":
    losses, others = ([row["loss"] for row in rows] for rows in (undisturbed, disturbed))
    ax = plots.loss_curve(disturbed, vocabulary=manifest.vocab_size)
    ax.plot(
        range(1, len(losses) + 1),
        losses,
        "o",
        color=plots.LINES[2],
        fillstyle="none",
        label="undisturbed",
    )
    missing = [row["step"] for row in disturbed if row["replicas"] == 1]
    ax.axvspan(missing[0] - 0.5, missing[-1] + 0.5, color="0.9", label="one replica")
    ax.legend()
    plots.show(
        alt=f"The losses of both runs are equal in all {len(losses)} steps, also in the steps "
        f"{missing[0]} to {missing[-1]}, which one replica computed alone."
    )
    print(f"one replica computed steps {missing[0]} to {missing[-1]} alone; equal losses: ", end="")
    print(sum(a == b for a, b in zip(losses, others, strict=True)), "of", len(losses))
    assert losses == others

# %% [markdown]
# ## The same run on 32 machines
#
# The table `[job]` of a config selects where the run executes. Here it requests 32 `p4d.24xlarge`
# from SageMaker (8 GPUs of 40 GB each), reads the tokens from an FSx for Lustre file system, and
# stores checkpoints in S3. `sharded_data_parallel_degree` is SMP's name for the shard degree; both
# names are accepted.

# %%
cluster_config = f"""
[model]
preset = "gpt2-30b"

[data]
sequence_length = 2048

[parallel]
sharded_data_parallel_degree = {degree}
bf16 = true

[batch]
micro_batch_size = 6

[optimizer]
lr = 1.2e-4

[train]
steps = 1000

[checkpoint]
every = 100

[job]
name = "gpt2-30b"
place = "sagemaker"
image = "auto"
instance_type = "ml.p4d.24xlarge"
nodes = 32
role = "arn:aws:iam::123456789012:role/nearlinear"
region = "us-west-2"
output = "s3://my-bucket/gpt2-30b"
checkpoints = "s3://my-bucket/gpt2-30b/checkpoints"
subnets = ["subnet-0123456789abcdef0"]
security_groups = ["sg-0123456789abcdef0"]
tags = {{ team = "models" }}

[job.inputs.train]
fsx = "fs-0123456789abcdef0"
directory = "/abcdefgh/tokens"
"""
cluster_path = work / "cluster.toml"
cluster_path.write_text(cluster_config)


def nearlinear(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "nearlinear.cli", *words]
    return subprocess.run(command, capture_output=True, text=True)


refused = nearlinear("launch", str(cluster_path), "--dry-run")
print(refused.stderr)
assert refused.returncode == 2 and 'activations.checkpoint = "each"' in refused.stderr

# %% [markdown]
# The job is refused, with the cheapest change: the shards fit, but the activations of 48 layers do
# not. The planner compares the ways to save them. *Checkpointing* keeps the input of each layer and
# computes the rest again in the backward pass. *Offloading* moves these inputs to host memory while
# other layers compute. `activation_loading_horizon` is the number of layers by which they are
# fetched ahead.

# %%
ways = {
    "keep all": {},
    "selective": {"checkpoint": "selective"},
    "each layer": {"checkpoint": "each"},
    "each layer, offloaded": {"checkpoint": "each", "offload": True},
}
table = tomllib.loads(cluster_config)
table["parallel"]["activation_loading_horizon"] = 4
plans = {
    way: nl.plan(table | {"activations": keys}, "p4d.24xlarge:32") for way, keys in ways.items()
}
for way, plan in plans.items():
    print(f"{way:>22}: {plan.memory / 2**30:6.1f} GiB per GPU, {plan.seconds:.2f} s per step")

fastest = min(plan.seconds for plan in plans.values() if plan.fits)
about_equal = [way for way, plan in plans.items() if plan.fits and plan.seconds < 1.01 * fastest]
chosen = min(about_equal, key=lambda way: plans[way].memory)  # of equals, the least memory
print(f"\nchosen: {chosen}; {plans[chosen].days:.1f} days, MFU {plans[chosen].mfu:.1%}")
assert not plans["keep all"].fits and chosen == "each layer, offloaded"
assert plans[chosen].memory / 2**30 <= 37

# %% [markdown]
# With the chosen keys the job passes. The planned memory and the price stand above the request.

# %%
horizon = "activation_loading_horizon = 4\n"
activations = "\n".join(f"{key} = {json.dumps(value)}" for key, value in ways[chosen].items())
cluster_config = cluster_config.replace("bf16 = true\n", f"bf16 = true\n{horizon}")
cluster_config = cluster_config.replace("[batch]", f"[activations]\n{activations}\n\n[batch]")
cluster_path.write_text(cluster_config)

shown = nearlinear("launch", str(cluster_path), "--dry-run")
assert shown.returncode == 0, shown.stderr
print(shown.stderr)
request = json.loads(shown.stdout)
for key in ("TrainingJobName", "ResourceConfig", "VpcConfig", "CheckpointConfig"):
    print(f"{key}: {request[key]}")
print("HyperParameters:")
for key, value in request["HyperParameters"].items():
    print(f"  {key} = {value}")

asked = json.loads(request["HyperParameters"]["mp_parameters"])
assert request["ResourceConfig"]["InstanceCount"] == 32
assert asked["hybrid_shard_degree"] == 128 and asked["activation_loading_horizon"] == 4
assert request["HyperParameters"]["activations-offload"] == "true"

# %% [markdown]
# The output is the request of SageMaker's `CreateTrainingJob`, with AWS's own image for this
# version of torch. Nothing was sent. Without `--dry-run` the same line checks the quotas and
# permissions of the account, asks for the price, and submits it; `nearlinear logs NAME --follow`
# follows its log. A
# request that the service would reject after minutes of waiting is rejected here, with a remedy.

# %%
faulty = nearlinear(
    "launch", str(cluster_path), "--dry-run",
    "--set", "job.subnets=[]", "--set", "job.security_groups=[]",
    "--set", "job.instance_type=ml.p4d.48xlarge", "--set", "job.ranks_per_node=8",
    "--set", "job.spot=true", "--set", "job.keep_warm_minutes=30",
)  # fmt: skip
print(faulty.stderr)
assert faulty.returncode == 2
assert all(word in faulty.stderr for word in ("VpcConfig", "InstanceType", "KeepAlive"))

# %% [markdown]
# Does the request train? `--place emulate` runs it on this machine, in the layout of a training
# container: 2 hosts, each with its own `/opt/ml`, hyperparameters and channels. A small
# model replaces the large one, and a folder the file system. The request, the entry point and the
# files are the same; only the machines are emulated.

# %%
job = work / "job"
small = {
    "model.preset": "gpt2-tiny",
    "model.overrides": "{n_layer = 2, n_embd = 64, n_head = 4}",
    "data.sequence_length": 32,
    "parallel.sharded_data_parallel_degree": 2,
    "parallel.bf16": "false",
    "batch.micro_batch_size": 2,
    "optimizer.lr": 5e-3,
    "train.steps": 4,
    "train.eval_sequences": 8,
    "train.sample_tokens": 0,
}
emulated = nearlinear(
    "launch", str(cluster_path), "--place", "emulate",
    "--hosts", "2", "--ranks", "1" if scale == "ci" else "2",
    "--folder", str(job), "--stand-in", f"fs-0123456789abcdef0/abcdefgh/tokens={work / 'tokens'}",
    *(word for key, value in small.items() for word in ("--set", f"{key}={value}")),
)  # fmt: skip
print(emulated.stdout)
assert emulated.returncode == 0, emulated.stderr

metrics = plots.read_metrics(job / "algo-1" / "output" / "data")
assert len(metrics) == 4 and metrics[-1]["loss"] < metrics[0]["loss"]
assert [path.name for path in (job / "kept").glob("step-*")] == ["step-00000004"]  # stands for S3

# %% [markdown]
# CloudWatch draws graphs from the output of a job: the request's metric definitions are regular
# expressions. Do they match every number?

# %%
definitions = request["AlgorithmSpecification"]["MetricDefinitions"]
steps_said = [line for line in emulated.stdout.splitlines() if line.startswith("step=")]
for definition in definitions:
    found = [re.search(definition["Regex"], line) for line in steps_said]
    values = [match[1] for match in found if match]
    name = definition["Name"]
    if name in ("loss_scale", "skipped") or "reward" in name:  # of float16 and of preferences
        assert not values
        continue
    print(f"{name:>15}: {len(values):>2} values, the last {values[-1]}")
    assert values

# %% [markdown]
# ## Summary
#
# - A shard group is the smallest set of ranks that holds the model states; replicas of it fill the
#   cluster. For GPT-2 30B on 256 GPUs with 40 GB: 128 x 2.
# - `nl.init`, `nl.shard` and `nl.accumulate` are the changes to a PyTorch script. The numbers equal
#   those of one process, up to rounding.
# - With two-hop synchronization, replicas communicate once per step instead of once per
#   micro-batch.
# - With `elastic.replicas`, a run goes on without a lost rank, and its losses keep their bits.
# - The same file and the same command train on a laptop and on 32 nodes. `nearlinear launch`
#   translates its `[job]` for SageMaker, Slurm or Kubernetes, and validates it before it is sent.
#
# ## Exercises
#
# 1. Change the degree in `held` to 1 and to 4. Which share does each rank hold, and what does
#    `print(nl.init(...))` show?
# 2. In `counted`, set `A = 8`. Which of the three bars grows with two hops, and which does not?
# 3. Pass `reshard_after_forward=True` to `nl.shard` in `counted`. Where do the 10 extra all-gathers
#    come from, and how much memory do they save? How does the count change without
#    `sdp_max_live_parameters`?
# 4. A 13-billion-parameter model on 8 nodes: which degree does the rule give, and how many
#    replicas? Check with `nl.Mesh.from_config`.
# 5. Print the run as a batch script for Slurm: `--place slurm`. Which fault must you fix first?
# 6. Set `elastic.mode` to `"rescale"` in `train_replicas`. Which losses change, and why?
# 7. Run this notebook with `scale = "laptop"` and `--set parallel.hybrid_shard_degree=4`. Do the
#    losses change? Should they?
