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
# # FSx for Lustre as input: from S3 to the training step
#
# After this notebook you can choose between a file system and S3 alone, create a file system and
# link it to S3, fetch the files before the first step needs them, attach the file system to a
# training job, diagnose a job that cannot reach it, and read in an order that suits its servers.
#
# At scale `ci` the AWS account is a server on this machine (moto), and the mounted file system is a
# folder with an emulated `lfs`. Requests, responses, files and training are real; the services are
# not. With `scale = "aws"` and a subnet, the same cells address your account.

# %% tags=["parameters"]
scale = "ci"  # ci: emulated account, seconds; laptop: more data; aws: your account, at a cost
subnet = ""  # aws: subnet of the file system and the job
security_group = ""  # aws: allows TCP 988 and 1018-1023 from and to itself
bucket = ""  # aws: an S3 bucket in the same region
role = ""  # aws: ARN of the job's role
image = "auto"  # AWS's image for the region, to which launch ships nearlinear; or your own
mounted = ""  # aws: mount point on this machine; empty: skip the cells that need it

# %%
import contextlib
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # ci, data_prep, when Jupyter was started in this folder

import boto3
import matplotlib.pyplot as plt
import numpy as np

import ci.emulation.aws
import data_prep
import nearlinear as nl
from nearlinear import cli, plots
from nearlinear.data.format import Manifest, Shard, encode_index
from nearlinear.data.loader import BlockShuffle
from nearlinear.launch import spec
from nearlinear.launch.fsx import access_checks, hydrate, lustre, service, throughput
from nearlinear.launch.sagemaker.request_checks import check_against_model, check_rules

assert scale in ("ci", "laptop", "aws"), f"scale = {scale!r}: use ci, laptop or aws"
keeper = tempfile.TemporaryDirectory(prefix="nearlinear-08-")  # removed when the kernel ends
work = Path(keeper.name)
open_until_the_end = contextlib.ExitStack()


def nearlinear(line: str) -> None:
    """Run `nearlinear ...` as in a terminal."""
    print(f"$ nearlinear {line}")
    assert cli.main(line.split()) == 0, "The command failed; its message is above."


# %% [markdown]
# ## The choice of storage
#
# | data | storage | reason |
# |:--|:--|:--|
# | up to 50-100 GB, read by one job | S3, `File` | it is copied to each machine, once |
# | larger, in files over 50 MB, in order | S3, `FastFile` | training starts while it streams |
# | larger, in random order, or small files | FSx for Lustre | many servers serve such reads |
# | read by several jobs | FSx for Lustre | data fetched from S3 once is available to all jobs |
#
# Source: Amazon SageMaker AI developer guide, "Choosing an input mode and a storage unit" and
# "Setting up training jobs to access datasets", 2026-11. Token shards are large files, so that
# `FastFile` is the first choice. A global shuffle reads them in random order, however, for which
# streams are least suitable.
#
# ## The account

# %%
account = None
if scale != "aws":
    account = open_until_the_end.enter_context(ci.emulation.aws.account(work / "account"))
    subnet, security_group = account.subnet, account.security_group
    bucket, role, mounted = account.bucket, account.role, str(account.lustre.folder)
    service.POLL_INTERVAL = hydrate.POLL_INTERVAL = 0.2  # the emulated service responds at once
    print(f"an account on {account.endpoint}, with a network, a role and s3://{bucket}")
for name in ("subnet", "security_group", "bucket", "role"):
    assert globals()[name], f"scale aws needs the parameter {name}"

# %% [markdown]
# ## Token shards in S3
#
# Notebook 01 turns text into token shards. The cell below writes a few of them, so that the order
# of restores matters.

# %%
documents = {"ci": 3000, "laptop": 9000, "aws": 9000}[scale]
data_prep.prepare(
    data_prep.sources.botocore(), work / "tokens", max_documents=documents, val_fraction=0.05,
    shard_tokens=30 * documents, progress=False,
)  # fmt: skip
s3, uploaded = boto3.client("s3"), lustre.list_files(work / "tokens")
for path in uploaded:
    s3.upload_file(str(path), bucket, f"tokens/{path.relative_to(work / 'tokens')}")
total = sum(path.stat().st_size for path in uploaded)
print(f"s3://{bucket}/tokens: {len(uploaded)} files, {total / 2**20:.2f} MiB")
assert len(uploaded) > 10

# %% [markdown]
# ## A file system
#
# Two types matter for training. *SCRATCH_2* is not replicated: suitable for data that S3 keeps,
# lost when a server fails. *PERSISTENT_2* is replicated, and its throughput is chosen independently
# of its size. Both come in 1.2 TiB, 2.4 TiB and multiples of that. Their throughput, by the
# service's formula:

# %%
sizes = np.array([1200, 2400, 4800, 9600, 19200, 38400])
fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
deployments = (("SCRATCH_2", 200), ("PERSISTENT_2", 125), ("PERSISTENT_2", 1000))
for number, (deployment, per_tib) in enumerate(deployments):
    rates = [service.total_throughput(int(gib), per_tib) / 1000 for gib in sizes]
    ax.plot(sizes / 1000, rates, marker=plots.MARKERS[number], color=plots.LINES[number],
            label=f"{deployment}, {per_tib} MB/s per TiB")  # fmt: skip
ax.set(xscale="log", yscale="log", xlabel="storage capacity, TiB",
       ylabel="throughput, GB/s")  # fmt: skip
ax.set_xticks(sizes / 1000, [f"{s / 1000:g}" for s in sizes])
ax.set_xticks([], minor=True)
ax.grid(color=plots.GRID, lw=0.8)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plots.show(
    alt="Throughput over the storage capacity of three types of file systems. It grows in "
    "proportion; "
    f"PERSISTENT_2 with 1000 MB/s per TiB gives {rates[0]:.1f} GB/s at 1.2 TiB and "
    f"{rates[-1]:.0f} GB/s at 38.4 TiB."
)

# %% [markdown]
# `--dry-run` prints the request without sending it:

# %%
words = f"fsx create --subnet {subnet} --security-group {security_group} --capacity 1200"
nearlinear(f"{words} --dry-run")
assert scale == "aws" or service.list_file_systems() == []

# %% [markdown]
# A request that the service would reject is rejected here, before it is sent. Every fault is
# printed with a remedy.

# %%
wrong = service.FileSystemRequest(
    subnet, deployment="PERSISTENT_2", capacity_gib=3600, mb_per_tib=99
)
for problem in wrong.find_problems():
    print(problem)
assert len(wrong.find_problems()) == 2

# %% [markdown]
# The next cell creates the file system. Creation takes five to ten minutes on AWS, and no time
# here.

# %%
before = {each.id for each in service.list_file_systems()}
nearlinear(words)
(made,) = {each.id for each in service.list_file_systems()} - before
assert service.describe_file_system(made).throughput == 240  # 1.2 TiB x 200 MB/s per TiB

# %% [markdown]
# ## The link to S3
#
# A *data repository association* shows a folder of S3 as a folder of the file system. Names appear
# at once; bytes are fetched when they are first read. File systems of Lustre 2.12 and later can
# have eight such links; SCRATCH_1 has none.

# %%
nearlinear(f"fsx link {made} s3://{bucket}/tokens /tokens")
system = service.describe_file_system(made)
(link,) = system.links
assert link.lifecycle == "AVAILABLE" and link.s3 == f"s3://{bucket}/tokens"

# %% [markdown]
# The *mount name* is easily forgotten. A training job does not request `/tokens` but
# `/MOUNT_NAME/tokens`, as in the last lines above.
#
# ## The mounted file system
#
# On AWS, run the mount command above on a machine of the VPC, and give the folder as the parameter
# `mounted`. Files appear with their names and sizes, but without their bytes.

# %%
mounts = account.lustre.mounts if account else lustre.MOUNT_TABLE
folder = Path(mounted) / "tokens" if mounted else None
if folder:
    for line in lustre.format_folder_info(lustre.inspect_folder(folder, mounts)):
        print(line)
    hydrate.require_hydratable(folder, mounts)
    start = hydrate.measure_progress(lustre.list_files(folder))
    print(start)
    assert start.num_files == len(uploaded) and start.num_bytes == total
    assert start.share == 0 or scale == "aws"

# %% [markdown]
# Without preparation, the first step would wait for S3 on every rank. `nearlinear fsx hydrate
# FOLDER` requests the files beforehand, in the order of the loader: the manifest, the tokenizer,
# then shards in the order of the shuffle. Lustre's servers queue the requests, so that hydration
# proceeds in batches.

# %%
if folder:
    order = hydrate.files_in_read_order(folder)
    seen = []
    end = hydrate.restore_files(order, batch_size=6, report=seen.append)
    print(end)

    fig, ax = plt.subplots(figsize=(7, 2.6), layout="constrained")
    ax.plot([now.restored_files for now in seen], [100 * now.share for now in seen], "o-",
            color=plots.PALETTE[0])  # fmt: skip
    ax.set(xlabel="files in the file system", ylabel="bytes restored, %", ylim=(0, 104))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(color=plots.GRID, lw=0.8)
    ax.spines[["top", "right"]].set_visible(False)
    plots.show(
        alt="Share of the bytes over the number of files in the file system during hydration. It "
        f"rises to {100 * end.share:.0f} % with {seen[-1].restored_files} files."
    )

    assert end.share == 1 and [path.name for path in order[:2]] == ["index.json", "tokenizer.json"]
    for path in uploaded:
        assert (folder / path.relative_to(work / "tokens")).read_bytes() == path.read_bytes()

# %% [markdown]
# ## Reads that suit Lustre
#
# The default order shuffles single sequences over the whole dataset. A sequence of 2,048 tokens is
# 4 KiB. The loader reads it through mapped memory, and a page fault makes Lustre's client fetch the
# surrounding MiB (source: LUDOC-485). Of the fetched bytes, 255 parts of 256 are unused, unless
# they are still in memory when a neighbour is read.
#
# `data.shuffle_block_mib = 4` shuffles blocks of 4 MiB instead, and distributes the sequences of
# `data.shuffle_blocks` blocks at a time evenly, so that every step takes sequences from all of
# them. The sequences of a step are again a function of seed and position, independent of the number
# of ranks. Ranks divide a step by position: each reads its own blocks, and each block once.
#
# The next cell counts requests for one epoch. The files are sparse and read like files of that
# size; the order does not depend on their contents. Each of four ranks caches a quarter of the
# data.

# %%
RANKS, MIB = 4, 2**20


def shards(path: Path, mib: list[int], bytes_of=None) -> nl.data.TokenDataset:
    """Write token shards of the given MiB, sparse or with the contents of `bytes_of(count)`."""
    (path / "train").mkdir(parents=True)
    made = []
    for number, each in enumerate(mib):
        tokens, name = each * MIB // 2, f"train/shard-{number:05d}.bin"
        with open(path / name, "wb") as file:
            file.write(bytes_of(each * MIB)) if bytes_of else file.truncate(each * MIB)
        index = encode_index(np.array([tokens]), np.dtype("<u2"))
        (path / name).with_suffix(".idx").write_bytes(index)
        made.append(Shard(name, tokens, 1, each * MIB, "", len(index), ""))
    words = {"name": "none", "file": "", "sha256": ""}
    Manifest(65_536, 0, words, {"train": tuple(made)}).write(path)
    return nl.data.TokenDataset(path, sequence_length=2048, verify="size")


size = {"ci": 64, "laptop": 512, "aws": 512}[scale]
large = shards(work / "holes", [size, size])


def epoch(blocks: BlockShuffle | None) -> list[float]:
    """Return requests per step, KiB per message and bytes fetched per byte used, of all ranks."""
    counts, steps = [], len(large) // 128
    for rank in range(RANKS):
        counts.append(large.count_reads(memory=size // 2 * MIB))
        loader = nl.data.Loader(large, 16, 2, rank, RANKS, blocks=blocks)
        for _ in range(steps):
            next(loader)
    fetched, used = sum(c.fetched for c in counts), sum(c.used for c in counts)
    requests, messages = sum(c.requests for c in counts), sum(c.rpcs for c in counts)
    return [requests / steps, used / messages / 1024, fetched / used]


usual, in_blocks = epoch(None), epoch(BlockShuffle(4, 8))
large.reads = None
titles = ["requests per step", "useful KiB per message", "bytes fetched per byte used"]
fig, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
for ax, title, *pair in zip(axes, titles, usual, in_blocks, strict=True):
    bars = ax.bar(["sequences", "blocks"], pair, color=[plots.PALETTE[1], plots.PALETTE[0]])
    ax.bar_label(bars, [f"{value:,.0f}" if value > 9 else f"{value:.2g}" for value in pair])
    ax.set_yscale("log")
    ax.set_ylim(min(pair) / 3, max(pair) * 4)
    bars[0].set(hatch=plots.HATCHES[1], edgecolor="white")
    ax.set_title(title, fontsize=10)
    ax.set_xlabel("order of reading")
    ax.spines[["top", "right"]].set_visible(False)
plots.show(
    alt="Reading by sequences and by blocks: "
    + "; ".join(
        f"{title} {one:,.4g} and {other:,.4g}"
        for title, one, other in zip(titles, usual, in_blocks, strict=True)
    )
    + ". Blocks need fewer and larger requests."
)

assert usual[2] > 100 and in_blocks[2] < 1.05  # nearly all fetched bytes are used
assert usual[0] > 100 * in_blocks[0] and in_blocks[1] > 700

# %% [markdown]
# The cost is less mixing: in one epoch a sequence shares steps only with sequences of its own 32
# MiB, and a rank's sequences of one step are neighbours, although those of the whole step are not.
# If documents of one kind are adjacent, shuffle them when you prepare the data, or use more blocks.
#
# ## The limiting rate
#
# Three rates matter: that of the file system for large reads that bypass the page cache, that of
# the loader on the same files, and that of training. `nearlinear fsx throughput FOLDER` measures
# the first two. Here the file system is this machine's disk.

# %%
some = nl.data.TokenDataset(folder, sequence_length=128) if scale == "aws" and folder else None
some = some or shards(work / "some", [64, 64], np.random.default_rng(0).bytes)
measured = throughput.measure_file_system(some.files, seconds=2)
loader = nl.data.Loader(some, 8, data_rank=0, data_ranks=1, blocks=BlockShuffle(4, 8), read_ahead=2)
found = throughput.measure_loader(loader, seconds=1)
demand = throughput.TrainingDemand(tokens_per_s=20_000)
for line in throughput.format_measurements(measured, found, demand):
    print(line)
assert measured.num_bytes > 0 and found.tokens_per_s > 0

# %% [markdown]
# ## The job
#
# The config's table `[job]` selects where to run. Its input consists of the lines printed by
# `nearlinear fsx describe`.

# %%
steps, per_rank = 8, 2
config = f"""
[model]
preset = "gpt2-tiny"
overrides = {{ n_layer = 2, n_embd = 32, n_head = 2 }}

[data]
sequence_length = 32
shuffle_block_mib = 1
shuffle_blocks = 8
read_ahead = 2

[parallel]
sharded_data_parallel_degree = 2

[batch]
micro_batch_size = {per_rank}

[optimizer]
lr = 1e-2
warmup_steps = 2

[train]
steps = {steps}
eval_sequences = 4
sample_tokens = 0

[run]
tensorboard = false

[job]
name = "gpt2-fsx"
place = "sagemaker"
image = "{image}"
instance_type = "ml.g5.8xlarge"
nodes = 2
role = "{role}"
output = "s3://{bucket}/output"
checkpoints = "s3://{bucket}/checkpoints"
subnets = ["{subnet}"]
security_groups = ["{security_group}"]
max_hours = 1

{system.input_toml("tokens")}"""
run = work / "run.toml"
run.write_text(config)
print(config[config.index("[job]") :])

# %% [markdown]
# Can the job reach its data? The check covers the state of the file system, the VPC of the job,
# Lustre's ports in both directions, and the mount name at the beginning of the folder:

# %%
nearlinear(f"fsx check {run}")

settings = ["job.inputs.train.directory=/tokens", 'job.subnets=["subnet-00000000000000000"]']
faulty, _ = spec.load(str(run), settings)
problems = access_checks.check_file_system_access(faulty)
for problem in problems:
    print(f"\n{problem.field}: {problem.cause}\n  -> {problem.remedy}")
assert {problem.field for problem in problems} == {"job.subnets", "job.inputs.train.directory"}

# %% [markdown]
# `--dry-run` prints the request for SageMaker without any change on AWS. The request is still
# validated against the service's model and its rules.

# %%
shown = subprocess.run(
    [sys.executable, "-m", "nearlinear.cli", "launch", str(run), "--dry-run"],
    capture_output=True, text=True,
)  # fmt: skip
assert shown.returncode == 0, shown.stderr
request = json.loads(shown.stdout)
print(json.dumps({key: request[key] for key in ("InputDataConfig", "VpcConfig")}, indent=2))

channel = request["InputDataConfig"][0]["DataSource"]["FileSystemDataSource"]
assert channel["FileSystemId"] == made and channel["FileSystemType"] == "FSxLustre"
assert channel["DirectoryPath"] == f"/{system.mount_name}/tokens"
assert check_against_model(request) == [] and check_rules(request) == []

# %% [markdown]
# The next cell sends the request, after checks of quotas, permissions, buckets and the network.
# `--yes` confirms its price. The account on this machine accepts it like the service, but runs
# nothing. On AWS the machines start and mount the file system.

# %%
nearlinear(f"launch {run} --yes")
summaries = boto3.client("sagemaker").list_training_jobs(NameContains="gpt2-fsx")
job = summaries["TrainingJobSummaries"][0]["TrainingJobName"]
nearlinear(f"status {job}")

# %% [markdown]
# To train, the same request runs on this machine: two hosts with the layout of the service's
# container, one rank each, and the mounted folder instead of the file system.

# %%
name = f"{made}{channel['DirectoryPath']}"
stand_in = f"{name}={folder or work / 'tokens'}"
command = [sys.executable, "-m", "nearlinear.cli", "launch", str(run), "--place", "emulate"]
command += ["--hosts", "2", "--ranks", "1", "--folder", str(work / "hosts")]
command += ["--stand-in", stand_in]
pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
printed = []
with subprocess.Popen(command, **pipe) as emulated:
    for line in emulated.stdout:
        if re.match(r"step=|done|error|mesh", line.strip()):
            printed.append(line.strip())
            print(line, end="")
assert emulated.returncode == 0, "The emulated job failed; its message is above."

# %% [markdown]
# The output of a job goes to CloudWatch. The submitted job has printed nothing, so that the cell
# writes the lines above to its log; on AWS they are already there.

# %%
if account:
    account.write_logs(job, "algo-1", printed)
nearlinear(f"logs {job}")

# %% [markdown]
# Machines cost money, so the job is stopped. The ranks receive SIGTERM and save a checkpoint before
# they exit.

# %%
nearlinear(f"stop {job}")
described = boto3.client("sagemaker").describe_training_job(TrainingJobName=job)
print(described["TrainingJobStatus"])
assert described["TrainingJobStatus"] in ("Stopping", "Stopped")

# %%
left = work / "hosts" / "algo-1" / "output" / "data"
metrics = plots.read_metrics(left)
vocabulary = Manifest.read(work / "tokens").vocab_size
plots.loss_curve(metrics, vocabulary=vocabulary)
plots.show(
    alt=f"Training and held-out loss of the job over {metrics[-1]['step']} steps fall from the "
    f"level "
    f"of guessing, {math.log(vocabulary):.1f} nats, to {metrics[-1]['loss']:.1f} nats."
)

assert metrics[-1]["step"] == steps
assert metrics[-1]["loss"] < metrics[0]["loss"] < math.log(vocabulary) + 0.5
kept = (left / "config.toml").read_text()
assert "shuffle_block_mib = 1" in kept and "hybrid_shard_degree = 2" in kept
state = json.loads((left / "data_state.json").read_text())["loader"]
assert state["shuffle_block_mib"] == 1 and state["next_sample"] == steps * 2 * per_rank

# %% [markdown]
# ## Cleaning up
#
# A file system costs money as long as it exists, used or not. The linked data remains in S3.
# Without `--yes` the command asks for confirmation.

# %%
nearlinear(f"fsx delete {made} --yes")
assert scale == "aws" or made not in {each.id for each in service.list_file_systems()}
open_until_the_end.close()

# %% [markdown]
# ## Summary
#
# - S3 alone is simpler. FSx for Lustre pays for data that is large and read in random order, or by
#   many jobs.
# - `nearlinear fsx create`, `link`, `describe`, `check` and `delete` cover all operations on AWS.
#   Every request is validated before it is sent, and printed by `--dry-run`.
# - Hydrate before the job: the first read of a file waits for S3.
# - The folder of a job begins with the mount name; ports 988 and 1018-1023 are open in both
#   directions.
# - `data.shuffle_block_mib` makes reads large, at the price of less mixing. Counters show the
#   saving.
#
# ## Exercises
#
# 1. Which of the two settings has the larger effect? In `epoch`, use `BlockShuffle(1, 64)` and
#    `BlockShuffle(16, 4)`. Why do useful KiB per message change, but not the bytes fetched?
# 2. Let each rank cache 8 MiB instead of 32. Which order suffers, and from which size on?
# 3. Give the loader `read_ahead=4` without blocks. How do the requests and the bytes fetched
#    change? (Explicit reads fetch only the requested bytes.)
# 4. Remove the rule for port 988 from the security group and run `nearlinear fsx check`. Which side
#    does it name?
# 5. Which throughput does 1.2 TiB of SCRATCH_2 give each of 32 machines? How many tokens per second
#    is that, and is it enough for the model of notebook 02?
