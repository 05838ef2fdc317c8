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
# # From text to token shards: preparing OpenWebText
#
# After this notebook you can turn a collection of text into files that training reads without
# waste: tokenize it, inspect the files with plain numpy, feed them to any number of ranks, stop and
# resume with another number of ranks, and detect a single damaged byte.
#
# The same commands prepare OpenWebText (9 billion tokens) on a larger machine. Here they run on a
# smaller text that needs no network: the AWS API documentation inside the `botocore` package, which
# is real technical English. Every claim about data in this notebook is asserted in a cell.

# %% tags=["parameters"]
scale = "ci"  # ci: 1 M tokens; laptop: the whole corpus; cluster: as ci, to plan OpenWebText
jsonl = ""  # a JSON-lines file of your own with a "text" field; empty: the botocore corpus
sentence = "A naïve trainer can't hold 13 billion parameters; a sharded one can."
sequence_length = 512  # tokens per training sample; the files do not depend on it
global_batch = 8  # samples per optimizer step over all ranks; a multiple of 8
seed = 0  # seed of the sample order
shard_tokens = 250_000  # tokens per file: small, for several files; default 64 Mi

# %%
import importlib.util
import sys

if importlib.util.find_spec("data_prep") is None:  # Jupyter started in notebooks/
    sys.path.insert(0, "..")

# %%
import contextlib
import io
import json
import shutil
import struct
import tempfile
import textwrap
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import data_prep
import nearlinear as nl
from nearlinear.config import train as train_config
from nearlinear.data import packing_efficiency
from nearlinear.plots import (
    GRID,
    INK,
    LINES,
    MUTED,
    PALETTE,
    loss_curve,
    rank_map,
    read_metrics,
    show,
    text_on,
)

plt.rcParams["figure.dpi"] = 110
keeper = tempfile.TemporaryDirectory(prefix="nearlinear-01-")  # removed when the kernel ends
work = Path(keeper.name)

# %% [markdown]
# ## The way in one picture
#
# Documents have different lengths; training samples have one length. The documents are therefore
# concatenated, each closed by an end-of-text token, and the stream is cut into equal windows. The
# loader returns the windows in a shuffled order, each to exactly one rank.


# %%
def tokens_of(row, cells, names, gap_after):
    """Draw one cell per token with its document, and a gap wherever `gap_after` changes."""
    gaps = 0.8 * np.cumsum(np.diff(gap_after, prepend=gap_after[0]) != 0)
    xs = np.arange(len(cells)) + gaps
    ax.broken_barh([(x, 0.9) for x in xs], (row, 0.6), facecolors=cells)
    for x, cell, name in zip(xs, cells, names, strict=True):
        ax.text(x + 0.45, row + 0.3, name, color=text_on(cell), fontsize=7, ha="center",
                va="center")  # fmt: skip
    return xs


figure, ax = plt.subplots(figsize=(8.6, 3.6), layout="constrained")
document = np.repeat(np.arange(5), [8, 5, 12, 6, 10])  # 41 tokens, end-of-text counted
is_last = np.diff(document, append=-1) != 0
cells = np.where(is_last, INK, np.array(PALETTE)[document])
names = np.array(list("ABCDE"))[document]
window = np.arange(40) // 10
order = np.concatenate([np.arange(40).reshape(4, 10)[w] for w in (2, 0, 3, 1)])
tokens_of(3, cells, names, document)
tokens_of(2, cells, names, np.zeros(41))
tokens_of(1, [*cells[:40], GRID], names, [*window, 4])
for rank, x in enumerate(tokens_of(0, cells[order], names[order], window)[::10]):
    ax.text(x + 5, -0.12, f"rank {rank}", ha="center", va="top", color=INK)
ax.set_yticks(np.arange(4) + 0.3, ["shuffled", "windows", "stream", "documents"], fontsize=11)
ax.text(44.5, 0.88, "left over", ha="center", va="top", color=MUTED, fontsize=9)
ax.set(xticks=[], xlim=(-0.5, 46.5), ylim=(-0.5, 3.9))
ax.set_title(
    "one cell is one token, with its document; dark cells are end-of-text", fontsize=10, color=MUTED
)
ax.tick_params(length=0)
ax.spines[:].set_visible(False)
show(
    alt="Five documents of 5 to 12 tokens are joined into one stream and cut into four windows of "
    "10 tokens, which ranks 0 to 3 read in shuffled order; one token is left over."
)

# %% [markdown]
# ## Notation
#
# | symbol | meaning | here |
# |:--|:--|:--|
# | $T$ | tokens in the stream, end-of-text tokens counted | about a million at `ci` |
# | $L$ | tokens per window | `sequence_length` |
# | $n = \lfloor T / L \rfloor$ | windows of one epoch | `len(dataset)` |
# | $R$ | data ranks: ranks that read different data | 1 to 8 |
# | $B$ | windows per rank and micro-batch | `micro_batch_size` |
# | $M$ | micro-batches per optimizer step | `micro_batches` |
# | $G = B \cdot M \cdot R$ | windows per optimizer step over all ranks | `global_batch` |

# %% [markdown]
# ## Text to tokens
#
# GPT-2 uses byte-level byte-pair encoding. Text becomes bytes, and pairs that were frequent in the
# tokenizer's training text are merged, the most frequent first. Every text can be encoded, because
# every byte is in the vocabulary. In the vocabulary's spelling, `Ġ` is a space; a letter outside
# ASCII consists of two or more bytes and therefore looks odd.
#
# Change `sentence` in the parameters and run again.

# %%
# NBVAL_CHECK_OUTPUT
tokenizer = data_prep.tokenizer.gpt2()
ids = tokenizer.encode(sentence)
print(f"{'id':>6}  {'in the vocabulary':<18} text")
for token in ids:
    piece = tokenizer.tokenizer.id_to_token(token)
    print(f"{token:>6}  {piece:<18} {tokenizer.decode([token])!r}")
print(f"\n{len(sentence.encode())} bytes, {len(ids)} tokens")

# %%
assert tokenizer.encode("Hello world") == [15496, 995]  # ids of OpenAI's GPT-2
assert tokenizer.decode(ids) == sentence  # the round trip is lossless
assert (tokenizer.vocab_size, tokenizer.eos_id) == (50257, 50256)

# %% [markdown]
# A web page may contain the characters `<|endoftext|>`. If they became the end-of-text token, a
# document could forge its own end. They remain text:

# %%
# NBVAL_CHECK_OUTPUT
forged = "The end.<|endoftext|>Not the end."
ids = tokenizer.encode(forged)
print([tokenizer.tokenizer.id_to_token(token) for token in ids])
assert tokenizer.eos_id not in ids
assert tokenizer.decode(ids) == forged

# %% [markdown]
# ## Preparing the shards
#
# `prepare` reads the source in splits, in bounded memory. It writes to a temporary folder and
# renames it at the very end, so that `out` is either complete or absent; an interrupted preparation
# resumes with the missing splits. A hash of each document decides between training and validation,
# so that two equal documents never end up on different sides.

# %%
source = data_prep.sources.jsonl([jsonl]) if jsonl else data_prep.sources.botocore()
max_tokens = {"ci": 1_000_000, "laptop": None, "cluster": 1_000_000}[scale]
out = work / "shards"

started = time.perf_counter()
manifest = data_prep.prepare(source, out, max_tokens=max_tokens, shard_tokens=shard_tokens)
seconds = time.perf_counter() - started
print(data_prep.summary(out).replace(str(work), "work"))

# %% [markdown]
# An interrupted source leaves no output behind:


# %%
def broken():
    yield "A first document."
    raise ConnectionError("the network went away")


with contextlib.suppress(ConnectionError):
    data_prep.prepare(data_prep.Source("broken", broken), work / "broken", progress=False)
assert not list(work.glob("broken*"))

# %% [markdown]
# A second call checks the folder and leaves it unchanged. With other settings, `prepare` refuses to
# replace the existing data.


# %%
def refusal(action, *arguments, **named) -> str:
    """Return the error message of `action`."""
    try:
        action(*arguments, **named)
    except nl.errors.DataError as error:
        return textwrap.fill(str(error).replace(str(work), "work"), 95, break_on_hyphens=False)
    raise AssertionError("it was accepted")


settings = {"max_tokens": max_tokens, "shard_tokens": shard_tokens, "progress": False}
assert data_prep.prepare(source, out, **settings) == manifest
print(refusal(data_prep.prepare, source, out, **settings, val_fraction=0.05))

# %% [markdown]
# ### The same for OpenWebText
#
# OpenWebText has 8,013,769 documents and about 9.04 billion GPT-2 tokens (the counts that nanoGPT
# publishes). One command prepares it. The text is streamed, and only the shards stay on disk.
#
# The size below is arithmetic: 2 bytes per token and 20 bytes of index per document. The time is an
# estimate for this machine, from the rate of the run above. It includes reading and cleaning of
# that source, but not the network.

# %%
openwebtext_documents, openwebtext_tokens = 8_013_769, 9.04e9
rate = manifest.total("tokens") / seconds
size = 2 * openwebtext_tokens + 20 * openwebtext_documents
print("nearlinear data openwebtext --out data/openwebtext")
print(f"  on disk  {size / 1e9:.1f} GB")
print(f"  time     {openwebtext_tokens / rate / 3600:.1f} hours (estimate: {rate:,.0f} tokens/s)")

# %% [markdown]
# ## Files of the folder
#
# The format is open, and older than this library. Each `.bin` file consists of token ids, 2 bytes
# each for GPT-2's vocabulary, as written by nanoGPT, OLMo and datatrove. Each `.idx` file holds the
# length of every document in Megatron's index format. `index.json` lists the files with their
# sizes, their sha256, and a checksum of every 4 MiB.

# %%
for path in sorted(p for p in out.rglob("*") if p.is_file()):
    print(f"{path.stat().st_size:>11,} bytes  {path.relative_to(out)}")
index = json.loads((out / "index.json").read_text())
print(json.dumps({key: index[key] for key in ("format", "dtype", "eos_id", "totals")}, indent=1))

# %% [markdown]
# `nearlinear data stats FOLDER --report report.html` prints statistics and writes a page with
# figures.

# %%
print(data_prep.report.stats(out).replace(str(work), "work"))
data_prep.report.write_page(out, work / "report.html")

# %% [markdown]
# A few lines of numpy read the whole training split. No part of `nearlinear` is needed.

# %%
shards = index["splits"]["train"]
stream = np.concatenate([np.fromfile(out / shard["file"], dtype="<u2") for shard in shards])
first_index = (out / shards[0]["file"]).with_suffix(".idx").read_bytes()
magic, version, dtype_code, documents, _ = struct.unpack_from("<9sQBQQ", first_index)
lengths = np.frombuffer(first_index, dtype="<i4", offset=34, count=documents)

print(magic, f"version {version}:", f"{documents:,} documents,", f"{lengths.sum():,} tokens\n")
print(tokenizer.decode(stream[: lengths[0] - 1])[:400])

# %% [markdown]
# `nl.data.TokenDataset` returns the same tokens, window by window. Windows cross the boundaries of
# documents and files. The number of end-of-text tokens equals the number of documents: no document
# forged one.

# %%
# NBVAL_CHECK_OUTPUT
dataset = nl.data.TokenDataset(out, "train", sequence_length=sequence_length)
whole = stream[: len(dataset) * sequence_length].reshape(-1, sequence_length)
assert np.array_equal(dataset.windows(np.arange(len(dataset))), whole)
assert len(stream) == dataset.tokens == index["totals"]["train"]["tokens"]
assert np.count_nonzero(stream == index["eos_id"]) == index["totals"]["train"]["documents"]
print(f"{dataset.tokens:,} tokens are {len(dataset):,} windows of {sequence_length}")

# %% [markdown]
# ## Document lengths

# %%
lengths = dataset.document_lengths()
assert lengths.sum() == dataset.tokens
ax = nl.plots.document_lengths(lengths)
ax.axvline(sequence_length, color=INK, ls="--", lw=1.5)
ax.text(sequence_length * 1.08, ax.get_ylim()[1] * 0.6, "one window", color=INK)
ax.set_title("documents of the training split", fontsize=11)
shorter = np.mean(lengths < sequence_length)
show(
    alt=f"Histogram of tokens per document: the median is {np.median(lengths):.0f}, and "
    f"{100 * shorter:.0f} % of the documents are shorter than one window."
)
print(f"{100 * shorter:.1f} % of the documents are shorter than one window")

# %% [markdown]
# ## The benefit of packing
#
# There is a simpler method than packing: cut every document to $L$ tokens and drop the shorter
# documents. The public GPT example for Amazon's SMP library prepares its data in this way. Every
# sample then comes from one document, but much text is lost:
#
# $$\text{kept by truncating} = \frac{L \cdot \#\{\text{documents with at least } L
# \text{ tokens}\}}{\text{all tokens}} \qquad
# \text{kept by packing} = \frac{L \cdot \lfloor T / L \rfloor}{T}$$
#
# The shards store documents, not windows, so that the rule for filling windows is chosen when
# reading. `concat` concatenates the documents and loses less than one window in all; it may split a
# document. `best_fit` splits only documents longer than a window, and places every remainder in the
# window where it fits best. `one_document` puts a single document in a window. The last two fill
# windows with padding. `nl.data.packing_efficiency` computes the share of kept tokens for each
# rule, from the lengths of the documents alone.

# %%
window_lengths = [L for L in (128, 256, 512, 1024, 2048, 4096) if 100 * L <= dataset.tokens]
found = {L: packing_efficiency(lengths, L) for L in window_lengths}
for L, ways in found.items():
    print(f"L = {L:>4}:", ", ".join(f"{way} {ways[way].share:.2%}" for way in ways))
    assert ways["concat"].tokens == L * len(nl.data.TokenDataset(out, sequence_length=L))
    assert dataset.tokens - ways["concat"].tokens < L
    assert ways["best_fit"].share > 0.995
    assert ways["truncate"].tokens == L * np.count_nonzero(lengths - 1 >= L)  # without EOS
    assert ways["truncate"].share < ways["concat"].share
    assert ways["best_fit"].filled >= ways["one_document"].filled
for L, counted in index["statistics"]["kept"]["train"]["lengths"].items():
    for way in ("concat", "one_document", "truncate"):  # best fit packs the documents of a shard
        assert int(L) not in found or counted[way] == found[int(L)][way].tokens

# %% [markdown]
# The documents of botocore are short, so that truncation costs more here than on web pages. The
# diamonds are OpenWebText: 31.5 % of the tokens kept at 512 and 19.8 % at 2048, measured on 1,000
# OpenWebText documents with the rules of the public SMP example. The dotted lines show the cost of
# not splitting documents: the share of the windows that holds text; the rest is padding.

# %%
figure, ax = plt.subplots(figsize=(7.4, 3.7), layout="constrained")
for way, colour, style, label in (
    ("concat", LINES[2], "s-", "concat"),
    ("best_fit", LINES[0], "o-", "best fit"),
    ("truncate", LINES[1], "^-", "truncating"),
):
    share = [100 * found[L][way].share for L in window_lengths]
    size, face = (9, "none") if way == "concat" else (5, colour)  # concat is behind best fit
    ax.plot(window_lengths, share, style, color=colour, ms=size, mfc=face, label=f"kept, {label}")
for way, colour, style in (("best_fit", LINES[0], "x:"), ("one_document", INK, "v:")):
    filled = [100 * found[L][way].filled for L in window_lengths]
    ax.plot(window_lengths, filled, style, color=colour, ms=5,
            label=f"places filled, {way.replace('_', ' ')}")  # fmt: skip
ax.plot([512, 2048], [31.5, 19.8], "D", ms=8, color=LINES[1], ls="none",
        label="kept, truncating 1,000\nOpenWebText documents")  # fmt: skip
ax.set_xscale("log", base=2)
ax.set_xticks(window_lengths, window_lengths)
ax.set(xlabel="sequence length, tokens", ylabel="share of tokens or places, %", ylim=(0, 108))
ax.grid(color=GRID)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
show(
    alt="Share of tokens kept over the sequence length. Concatenating and best fit keep nearly "
    "all; "
    "truncating and dropping keeps less with every longer sequence: "
    f"{100 * found[window_lengths[0]]['truncate'].share:.0f} % at {window_lengths[0]} tokens and "
    f"{100 * found[window_lengths[-1]]['truncate'].share:.0f} % at {window_lengths[-1]}."
)

# %% [markdown]
# Sharing a window has a price: its documents attend to each other, unless the run masks them
# (`nl.data.Masks`). The end-of-text token between documents tells the model where a document ends.
# GPT-3 was trained with shared windows (Brown et al. 2020, appendix B).

# %% [markdown]
# ## A common order for all ranks
#
# The order of an epoch is a permutation of the windows, computed from the seed by arithmetic alone.
# It takes no memory and no communication. Step $s$ takes positions $sG$ to $sG + G - 1$ of that
# order, and each rank reads its own part. `batch_id` identifies the windows of a step, so that
# ranks can verify that they agree.
#
# The next cell records the windows that a loader requests from the dataset.


# %%
class Watched(nl.data.TokenDataset):
    """Dataset that records the last requested windows."""

    def rows(self, indices, documents=False):
        self.asked = indices.tolist()
        return super().rows(indices, documents)


watched = Watched(out, "train", sequence_length=sequence_length)


def loaders(data_ranks, state=None, samples=global_batch):
    """Return the loaders of `data_ranks` ranks that share `samples` windows per step."""
    size = samples // data_ranks
    made = [
        nl.data.Loader(watched, size, data_rank=rank, data_ranks=data_ranks, seed=seed)
        for rank in range(data_ranks)
    ]
    for loader in made if state else ():
        loader.load_state_dict(state)
    return made


def step(ranks):
    """Return the window numbers of each rank's next step, a list per rank."""
    numbers = []
    for loader in ranks:
        batch = next(loader)[0]["input_ids"]
        assert np.array_equal(batch, whole[watched.asked])
        numbers.append(watched.asked)
    return numbers


# %% [markdown]
# Four ranks together read exactly the windows that one rank with the whole batch reads. No window
# is read twice in an epoch.

# %%
# NBVAL_CHECK_OUTPUT
four, alone = loaders(4), loaders(1)
seen = []
for _ in range(len(dataset) // global_batch):
    of_rank = step(four)
    together = sum(of_rank, [])
    assert together == step(alone)[0]
    assert len({loader.batch_id for loader in [*four, *alone]}) == 1
    seen += together
assert len(seen) == len(set(seen)) > len(dataset) - global_batch
print(f"one epoch: {len(seen):,} of {len(dataset):,} windows, each read by one rank, once")

# %% [markdown]
# ## Stop on 4 ranks, go on with 2
#
# Clusters shrink and grow. The state of the loader is one position in the order and suits any
# number of ranks. Here a run stops after three steps on 4 ranks and resumes with 2.

# %%
# NBVAL_CHECK_OUTPUT
before = loaders(4)
history = [step(before) for _ in range(3)]
state = before[0].state_dict()
assert all(loader.state_dict() == state for loader in before)  # the same on every rank
after = loaders(2, state)
history += [step(after) for _ in range(3)]
print(json.dumps(state, indent=1))

# %%
colours = [PALETTE[i] for i in (0, 2, 3, 4)]
figure, ax = plt.subplots(figsize=(7.8, 3.6), layout="constrained")
for row, of_rank in enumerate(history):
    places = [(rank, number) for rank, numbers in enumerate(of_rank) for number in numbers]
    for place, (rank, number) in enumerate(places):
        ax.broken_barh([(place + 0.04, 0.92)], (row + 0.07, 0.86), color=colours[rank])
        ax.text(place + 0.5, row + 0.5, number, ha="center", va="center",
                color=text_on(colours[rank]))  # fmt: skip
ax.plot([0, global_batch], [3, 3], color=INK, lw=2, clip_on=False)
ax.text(global_batch + 0.15, 3, "state saved\nand loaded", va="center", color=INK)
for rank in range(4):
    ax.plot([], [], "s", ms=10, color=colours[rank], label=f"rank {rank}")
ax.set(xlim=(0, global_batch), ylim=(6, 0), xticks=[], yticks=np.arange(6) + 0.5)
ax.set_yticklabels([f"step {number}, {len(r)} ranks" for number, r in enumerate(history)])
ax.set_title("numbers of the windows read in each step", fontsize=11)
ax.tick_params(length=0)
ax.spines[:].set_visible(False)
figure.legend(loc="outside lower center", ncols=4, frameon=False)
show(
    alt="Numbers of the windows read by each rank in six steps: three steps on 4 ranks, then the "
    "state is loaded on 2 ranks, which read the following windows of the same order."
)

# %% [markdown]
# The steps after the stop equal those of a run without interruption. This holds for every number of
# ranks, and for other batch sizes as well: three ranks with two windows each take smaller steps
# through the same order.

# %%
uninterrupted = loaders(1)
expected = [step(uninterrupted)[0] for _ in range(6)]
assert [sum(of_rank, []) for of_rank in history] == expected
for data_ranks in (1, 2, 4, 8):
    resumed = loaders(data_ranks, state)
    assert [sum(step(resumed), []) for _ in range(3)] == expected[3:]
smaller = loaders(3, state, samples=6)
read = sum((sum(step(smaller), []) for _ in range(4)), [])
assert read[: 3 * global_batch] == sum(expected[3:], [])[: len(read)]

# %% [markdown]
# A state of another order is rejected, because the run would repeat some samples and skip others:

# %%
other = nl.data.Loader(dataset, micro_batch_size=global_batch, seed=seed + 1)
print(refusal(other.load_state_dict, state))

# %% [markdown]
# ## A wrong byte
#
# Files are damaged on disks, in copies and by hand. Most wrong bytes are still valid token ids, so
# that training would continue with wrong text. The next cell flips one bit in a copy of the shards.
# The size is unchanged, so that a check of sizes passes; a check of contents names the file.

# %%
copy = work / "copy"
shutil.copytree(out, copy)
victim = copy / shards[0]["file"]
raw = bytearray(victim.read_bytes())
raw[len(raw) // 2] ^= 1
victim.write_bytes(raw)

nl.data.TokenDataset(copy, sequence_length=sequence_length, verify="size")  # does not detect it
complaint = refusal(nl.data.TokenDataset, copy, sequence_length=sequence_length)
print(complaint)
assert shards[0]["file"] in complaint

# %% [markdown]
# The error states the remedy: copy the file again. Then every byte is correct. Datasets up to 2 GiB
# are verified completely when opened. For larger ones only sizes are checked; `nearlinear data
# verify FOLDER` verifies every byte before a long run.

# %%
shutil.copy(out / shards[0]["file"], victim)
mended = nl.data.TokenDataset(copy, sequence_length=sequence_length, verify="full")
assert mended.fingerprint == dataset.fingerprint
assert np.array_equal(mended.windows(np.arange(len(mended))), whole)

# %% [markdown]
# ## The tokens in use
#
# Do the shards train a model? A very small GPT-2 reads them for a few steps, on 4 ranks of this
# machine (threads, which start at once). Each rank holds a shard of the model and reads windows of
# its own. In the picture a cell is a rank, and equal colours are equal shards.

# %%
settings = {
    "model": {"preset": "gpt2-tiny", "overrides": {"n_layer": 1, "n_embd": 32, "n_head": 1}},
    "data": {"path": str(out), "sequence_length": 32},
    "parallel": {"hybrid_shard_degree": 2},
    "batch": {"micro_batch_size": 2},
    "optimizer": {"lr": 2e-2, "warmup_steps": 2},
    "train": {"steps": 8, "eval_every": 4, "eval_sequences": 4, "sample_tokens": 0},
    "run": {"folder": str(work / "run"), "tensorboard": False},
}
with contextlib.redirect_stdout(io.StringIO()):  # metrics.jsonl has the same lines
    results = nl.spmd.run(lambda rank: nl.Trainer(train_config.load(settings)).fit(), ranks=4)
print(f"held-out loss after {results[0].steps} steps: {results[0].eval_loss:.2f} nats")

figure, (left, right) = plt.subplots(
    1, 2, figsize=(9, 2.8), width_ratios=[1, 2], layout="constrained"
)
rank_map(nl.Mesh(replicate=2, shard=2), left)
loss_curve(read_metrics(work / "run"), vocabulary=manifest.vocab_size, ax=right)
show(
    alt="Left: four ranks in two replicas of two shards. Right: training and held-out loss fall "
    "from "
    f"the level of guessing to {results[0].eval_loss:.1f} nats in 8 steps."
)

assert len(set(results)) == 1  # equal on every rank
assert results[0].eval_loss < np.log(manifest.vocab_size) - 1

# %% [markdown]
# ## Summary
#
# - `data_prep.prepare(source, out)` turns text into token shards split by split. `out` is complete
#   or absent, and an interrupted preparation resumes.
# - A shard consists of plain token ids that numpy reads. The sequence length is chosen when
#   reading.
# - Packing keeps all tokens but the last partial window. Truncating and dropping kept 31.5 % of the
#   tokens of 1,000 OpenWebText documents at a sequence length of 512.
# - The order of the samples depends only on the seed and the position. Ranks therefore agree
#   without communication, and a run resumes exactly on another number of ranks.
# - A single wrong bit is detected, and the error names file, block and bit.
#
# ## Exercises
#
# 1. Encode the same sentence in English, in another language, and as Python code. Which takes the
#    most tokens per byte? Why?
# 2. A third rule cuts each document into whole windows and drops only its last partial window.
#    Compute the share of kept tokens from `lengths`, and add it to the plot. When is it nearly as
#    good as packing?
# 3. Prepare the shards again with `shard_tokens=50_000` in another folder. Is the stream the same?
#    Can a loader resume from `state` on it? Look at `fingerprint` for the reason. Would it be safe?
# 4. Damage `copy` in other ways: cut off the end of a file, swap two `.bin` files, change `eos_id`
#    in `index.json`. Which damages are detected, and what are the errors?
# 5. Write a source of your own: `data_prep.Source(name="mine", documents=lambda: iter(texts))`. Put
#    one text in it twice. Can the two copies end up in different splits?
#
# Next: [02_train_gpt2](02_train_gpt2.ipynb) trains a GPT-2 on shards like these.
