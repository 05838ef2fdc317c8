# %% [markdown]
# # Split a Llama: tensor, sharded and context parallelism together
#
# After this notebook you can explain why sharding alone cannot use every GPU of a large cluster,
# split an unmodified Hugging Face Llama over tensor ranks with one line, draw the slices of every
# matrix and their ranks, count the communication of a step and say when it becomes the bottleneck,
# and train on sequences that no single rank could hold.
#
# Everything runs on this machine: the ranks are threads, the collectives and the sharding are real,
# and every claim is checked against the same model in one process.

# %% tags=["parameters"]
scale = "ci"  # ci: seconds on 2 cores; laptop: a larger model and longer sequences

# %%
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, logging

import nearlinear as nl
from nearlinear import plots

assert scale in ("ci", "laptop", "cluster"), f"scale = {scale!r}: use ci, laptop or cluster"
logging.set_verbosity_error()  # of transformers

# %% [markdown]
# ## The batch that grew too large
#
# | symbol | meaning |
# |---|---|
# | $W$ | ranks (GPUs) |
# | $S$ | shard degree: ranks that share one copy of the model states |
# | $T$ | tensor parallel degree: ranks that compute every layer together |
# | $C$ | context parallel degree: ranks that split every sequence |
# | $b$, $s$ | sequences of one micro-batch, tokens of one sequence |
#
# Sharding divides memory, not work: every rank still reads a batch of its own, so that a step
# trains on $W \cdot b \cdot s$ tokens. Beyond some batch size, more tokens per step no longer help
# a model to converge, and the cluster cannot grow any further. Ranks that compute a layer
# *together* read the *same* batch: with $T$ of them a step trains on $W / T \cdot b \cdot s$
# tokens.

# %%
SEQUENCES, TOKENS = 4, 4096  # a micro-batch, as for a Llama 2
clusters = [64, 128, 256, 512, 1024, 2048]


def batch_tokens(ranks: int, tensor: int) -> float:
    """Return the millions of tokens in a step of one micro-batch."""
    degrees = nl.ParallelConfig(tensor_parallel_degree=tensor, hybrid_shard_degree=8)
    mesh = nl.Mesh.from_config(degrees, ranks, ranks_per_node=8)
    return mesh.data_ranks * SEQUENCES * TOKENS / 1e6


sharded = [batch_tokens(ranks, 1) for ranks in clusters]
together = [batch_tokens(ranks, max(1, ranks // 256)) for ranks in clusters]

ax = plt.subplots(figsize=(7, 3.2), layout="constrained")[1]
ax.plot(clusters, sharded, "o-", color=plots.LINES[0], label="sharding alone")
ax.plot(clusters, together, "s--", color=plots.LINES[1], label="tensor degree grows from 256 on")
ax.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="million tokens per step")
ax.set_xticks(clusters, map(str, clusters))
ax.legend(frameon=False)
plots.show(
    alt="Batch size over the number of GPUs. With sharding alone it doubles with the GPUs; with a "
    f"tensor degree that grows from 256 GPUs on it stays at {together[-1]:.1f} million tokens."
)

assert sharded[-1] == 8 * sharded[2]
assert together[2:] == [together[2]] * 4  # the batch size stays constant

# %% [markdown]
# ## Splitting the model in one line
#
# The example is a small Llama with the real model's code. `nl.transform` changes it in place as
# configured: query, key, value, gate and up projections are split by their outputs (that is, by
# attention heads), output and down projections by their inputs, embeddings and head by vocabulary.
# The modules keep their names and their code.


# %%
def llama() -> LlamaForCausalLM:
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
    shape |= {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8}
    if scale != "ci":
        shape |= {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6}
    return LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=2048))


def split_llama(rank, config):
    """Return the split and sharded model; its values depend on seed 0 only, not on the layout."""
    mesh = nl.init(config)
    with nl.deferred_init(seed=0):  # no rank ever holds the whole model
        model = llama()
    model = nl.transform(model)
    return mesh, nl.shard(model)


LAYOUT = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}  # on 8 ranks: 2 replicas
MATRICES = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight")


def slices_of(rank):
    mesh, model = split_llama(rank, LAYOUT)
    held = nl.local_shards(model)
    everything = sum(p.to_local().numel() for p in model.parameters())
    return {name: held[name] for name in MATRICES}, everything, str(mesh)


found = nl.spmd.run(slices_of, 8)
print(found[0][2])

# %% [markdown]
# The ranks themselves report their slices of two matrices. Tensor ranks (0 and 1) cut a
# column-parallel matrix by its rows, which are its outputs, and a row-parallel one by its columns.
# The shard group (0 and 2) cuts the remainder, again by rows. Ranks with the same colour are
# replicas with equal contents.

# %%
width = llama().config.hidden_size
fig, axes = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
for name, ax in zip(MATRICES, axes, strict=True):
    plots.slices((width, width), [blocks[name] for blocks, _, _ in found], name[15:-7], ax)
plots.show(
    alt="Blocks of two weight matrices of one layer, labeled with ranks. The query projection is "
    "split by rows only; the output projection by columns over tensor ranks and by rows over "
    "shards. "
    "Ranks 0 to 3 hold the same blocks as ranks 4 to 7."
)

total = sum(p.numel() for p in llama().parameters())
for rank, (_, mine, _) in enumerate(found[:4]):
    print(f"rank {rank} holds {mine:,} of {total:,} parameters")

assert all(mine < 1.02 * total / 4 for _, mine, _ in found)  # norms are on both tensor ranks
column, row = MATRICES
assert found[1][0][column][0].offset == (width // 2, 0)  # rank 1: the lower half of the outputs
assert found[1][0][row][0].offset == (0, width // 2)  # and the right half of the inputs
assert found[0][0] == found[4][0]  # replicas

# %% [markdown]
# ## The same training as in one process
#
# The layout of the eight ranks is 2 tensor x 2 shard x 2 replicate. A step has four micro-batches,
# and gradients are synchronized in two hops: within the shard group after every micro-batch,
# between replicas once. One process runs the unmodified model on the same tokens.


# %%
STEPS, ROWS, LENGTH = 3, 16, 48


def tokens(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 512, (ROWS, LENGTH), generator=generator)


def alone() -> list[float]:
    torch.manual_seed(0)
    model, losses = llama(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, fused=True)
    for step in range(STEPS):
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parallel(rank, config, micro_batches=4) -> tuple[list[float], int]:
    """Return the losses of the same steps, and the sequences read by this rank's group."""
    mesh, model = split_llama(rank, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, fused=True)
    losses = []
    for step in range(STEPS):
        mine = tokens(step).chunk(mesh.data_ranks)[mesh.data_rank(rank)]
        batches = [{"input_ids": ids, "labels": ids} for ids in mine.chunk(micro_batches)]
        total = torch.zeros(1)
        for batch in nl.accumulate(model, batches):
            loss = model(**batch).loss
            loss.backward()
            total += loss.detach() / len(batches)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / mesh.world)
    return losses, len(mine)


reference = alone()
results = nl.spmd.run(parallel, 8, args=(LAYOUT,))
for step, (one, many) in enumerate(zip(reference, results[0][0], strict=True)):
    print(f"step {step}: one process {one:.6f}   eight ranks {many:.6f}")

assert all(
    abs(a - b) < 1e-5 for losses, _ in results for a, b in zip(losses, reference, strict=True)
)

# %% [markdown]
# ## More ranks, the same batch
#
# The experiment confirms the argument: from one rank to eight, the global batch stays at 16
# sequences, and the losses stay the same. No learning rate changes.

# %%
for ranks, tensor in [(1, 1), (2, 2), (4, 4), (8, 8)]:
    results = nl.spmd.run(parallel, ranks, args=({"tensor_parallel_degree": tensor}, 1))
    losses, sequences = results[0]
    print(f"{ranks} ranks, tensor degree {tensor}: {sequences} sequences a step, "
          f"loss after {STEPS} steps {losses[-1]:.6f}")  # fmt: skip
    assert sequences == ROWS and abs(losses[-1] - reference[-1]) < 1e-5

# %% [markdown]
# ## Communication of a step
#
# Between layers each tensor rank keeps its own share of the tokens (*sequence parallelism*), so
# that norms, residuals and dropout are not duplicated either. Attention and MLP all-gather the
# tokens on entry and reduce-scatter their sums on exit: for $L$ layers, $2L$ gathers and $2L$
# reduce-scatters forwards and as many backwards, and one more of each for head and embeddings. The
# loss exchanges three numbers per token instead of logits. The gradients of norms, which all tensor
# ranks share, take one all-reduce per step. There is no other communication.


# %%
def travels(rank):
    mesh, model = split_llama(rank, {"tensor_parallel_degree": 2})
    ids = tokens(0)
    model(ids)  # the first batch is compared between tensor ranks, once
    with nl.count_collectives() as counts:
        for batch in nl.accumulate(model, [{"input_ids": ids, "labels": ids}]):
            with nl.count_collectives() as forward:
                loss = model(**batch).loss
            with nl.count_collectives() as backward:
                loss.backward()
    return dict(forward.calls), dict(backward.calls), dict(counts.calls)


forward, backward, step = nl.spmd.run(travels, 2)[0]
print(f"forward   {forward}\nbackward  {backward}\nthe step  {step}")

layers = llama().config.num_hidden_layers
assert forward == {"all_gather": 2 * layers + 1 + 1, "reduce_scatter": 2 * layers + 1}
assert backward == {"all_gather": 2 * layers + 1, "reduce_scatter": 2 * layers + 1}
assert step["all_reduce"] == 2  # gradients of norms, and target counts of the micro-batches

# %% [markdown]
# When does communication become the bottleneck? Per layer and direction, a rank sends and receives
# $4 \cdot 2 \cdot b s E \cdot (T-1)/T$ bytes (four collectives in bfloat16). It computes $24\, b s
# E^2 / T$ floating-point operations forwards (an MLP of four widths, without attention scores). The
# batch cancels: the ratio depends on the model's width over the tensor degree, and on the
# operations that the machine computes per byte sent. Figures of an H100: 989 TFLOPS dense in
# bfloat16, 450 GB/s each way over NVLink (NVIDIA, data sheet, 2023); 50 GB/s each way for a GPU's
# share of a p5's network (AWS, instance types: 3200 Gbit/s for 8 GPUs).

# %%
PEAK, REACHED = 989e12, 0.5
LINKS = {"NVLink, 450 GB/s": 450e9, "network, 50 GB/s": 50e9}


def communication_share(embedding: int, tensor: int, bytes_per_s: float) -> float:
    """Return communication time over computation time of a layer's forward pass."""
    computing = 24 * embedding**2 / tensor / (PEAK * REACHED)
    return 4 * 2 * embedding * (tensor - 1) / tensor / bytes_per_s / computing


print(f"{'':20}" + "".join(f"{f'T = {t}':>9}" for t in (2, 4, 8, 16)))
for model_name, embedding in (("Llama 2 7B", 4096), ("Llama 2 70B", 8192)):
    for link, speed in LINKS.items():
        shares = [communication_share(embedding, t, speed) for t in (2, 4, 8, 16)]
        print(f"{model_name:12}{link:>18}" + "".join(f"{share:>8.0%} " for share in shares))

assert communication_share(8192, 8, LINKS["NVLink, 450 GB/s"]) < 0.5
assert communication_share(8192, 8, LINKS["network, 50 GB/s"]) > 1  # longer than the computation

# %% [markdown]
# Tensor ranks therefore belong on one node, and `nl.transform` warns about other layouts. Across
# nodes, shard or replicate.

# %% [markdown]
# ## Sequences that no rank holds
#
# Context ranks split every *sequence*. Queries stay in place while keys and values are exchanged:
# in a ring, from rank to rank during computation (`cp_comm_type = "p2p"`), or in one all-gather
# (`"all_gather"`). Causal attention makes late tokens expensive and early ones cheap, so that
# consecutive parts would leave the first ranks idle. Rank $r$ of $C$ therefore gets the chunks $r$
# and $2C-1-r$ (zig-zag). The figure shows the number of scores computed by each of 4 ranks.

# %%
CONTEXT, SEQUENCE = 4, 64
cost = torch.arange(1, SEQUENCE + 1)  # keys that each token sees
consecutive = [int(part.sum()) for part in cost.chunk(CONTEXT)]
chunks = cost.chunk(2 * CONTEXT)
zigzag = [int((chunks[r] + chunks[2 * CONTEXT - 1 - r]).sum()) for r in range(CONTEXT)]

ax = plt.subplots(figsize=(6, 2.6), layout="constrained")[1]
for offset, values, label in ((-0.2, consecutive, "consecutive"), (0.2, zigzag, "zig-zag")):
    ax.bar([r + offset for r in range(CONTEXT)], values, 0.4, label=label,
           color=plots.PALETTE[offset > 0], hatch=plots.HATCHES[offset > 0],
           edgecolor="white")  # fmt: skip
ax.set(xticks=range(CONTEXT), xlabel="context rank", ylabel="scores computed")
ax.legend(frameon=False)
plots.show(
    alt="Attention scores computed by each context rank. Consecutive parts give the last rank "
    f"{max(consecutive) / min(consecutive):.0f} times the work of the first; zig-zag parts are "
    f"equal."
)

assert len(set(zigzag)) == 1 and max(consecutive) > 6 * min(consecutive)

# %% [markdown]
# The model and the call are unchanged: every context rank receives the whole batch and takes its
# part. The loss is that of whole sequences, on every rank.

# %%
for comm_type in ("p2p", "all_gather"):
    layout = {"context_parallel_degree": 4, "hybrid_shard_degree": 4, "cp_comm_type": comm_type}
    losses, _ = nl.spmd.run(parallel, 4, args=(layout, 1))[0]
    print(f"context degree 4, {comm_type:>10}: {losses[-1]:.6f}   one process {reference[-1]:.6f}")
    assert all(abs(a - b) < 1e-5 for a, b in zip(losses, reference, strict=True))

both = {"tensor_parallel_degree": 2, "context_parallel_degree": 2, "hybrid_shard_degree": 2}
losses, _ = nl.spmd.run(parallel, 8, args=(both, 2))[0]
assert all(abs(a - b) < 1e-5 for a, b in zip(losses, reference, strict=True))
print(f"2 tensor x 2 context x 2 replicas: {losses[-1]:.6f}")

# %% [markdown]
# The benefit is memory. From forward to backward, a rank keeps the activations of its own tokens
# only. Below, the sequence length grows with the context degree, and the memory of a rank stays
# constant.


# %%
def kept_bytes(rank, degree, length):
    """Return the bytes that autograd keeps on this rank for the backward pass of a sequence."""
    _, model = split_llama(rank, {"context_parallel_degree": degree})
    kept = {}

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    generator = torch.Generator().manual_seed(0)  # every rank gets the whole sequence
    ids = torch.randint(0, 512, (1, length), generator=generator)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    found = sum(kept.values())
    loss.backward()
    return found


base = 128
kept = {}
for degree in (1, 2, 4):
    kept[degree] = max(nl.spmd.run(kept_bytes, degree, args=(degree, base * degree)))
    alone_kept = nl.spmd.run(kept_bytes, 1, args=(1, base * degree))[0]
    print(f"{base * degree:4} tokens: one rank keeps {alone_kept / 2**20:6.2f} MiB, "
          f"each of {degree} context ranks {kept[degree] / 2**20:6.2f} MiB")  # fmt: skip

assert max(kept.values()) < 1.1 * min(kept.values())

# %% [markdown]
# ## From a config, and on a cluster
#
# The same degrees are keys of the table `[parallel]`, or flags:
#
# ```sh
# nearlinear train run.toml --set parallel.tensor_parallel_degree=8 \
#     --set parallel.context_parallel_degree=2 --set parallel.hybrid_shard_degree=16
# ```
#
# Invalid degrees are rejected before anything starts, with the allowed values:

# %%
for wrong in (
    {"tensor_parallel_degree": 3},
    {"context_parallel_degree": 4, "hybrid_shard_degree": 2},
):
    try:
        nl.Mesh.from_config(nl.ParallelConfig(**wrong), 8)
        raise AssertionError(f"{wrong} was not rejected")
    except nl.errors.ConfigError as error:
        print(error)

# %% [markdown]
# ## Summary
#
# - Sharding alone grows the batch with the cluster. Tensor ranks share a batch, so that its size
#   stays.
# - Call `nl.transform(model)` before `nl.shard(model)`; the model, the loss and the loop do not
#   change.
# - Tensor ranks communicate four times per layer and direction: keep them on one node.
# - The longest possible sequence grows with the number of context ranks, at equal memory.
# - All techniques compose with sharding and replicas, and equal one process within 1e-5.
#
# ## Exercises
#
# 1. Which layouts of 64 ranks, 8 to a node, train a Llama 2 70B on 4 million tokens per step? Use
#    `nl.Mesh.from_config` and `communication_share`.
# 2. Change `llama` to two key-value heads. Which tensor degrees remain possible, and which error
#    does `nl.transform` raise for the others?
# 3. Count the bytes sent per step with `context_parallel_degree` 2 and 4, for both values of
#    `cp_comm_type`. Which grows with the degree?
