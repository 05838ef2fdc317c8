"""Memory report: parts compared with independent counts, and its output."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import nearlinear as nl
from nearlinear import plots
from nearlinear.config import train as train_config
from nearlinear.memory import SavedTensors, communication_bytes
from tests.support import parity
from tests.support.live_storages import LiveStorages

WIDTH, INNER, ROWS, LAYERS = 8, 32, 4, 3


class Layer(nn.Module):
    """Layer that saves its input and two copies of its hidden activation."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).square())


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = x + 0  # the input of the model is not an activation
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().sum()


def measured(rank, config, micro_batches=1, build=Tower):
    """Return the reports of two steps of ``build()`` on inputs of shape (ROWS, WIDTH)."""
    nl.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = build()
    nl.shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    reports = []
    for _ in range(2):
        with nl.memory_report(model, optimizer) as memory:
            inputs = [torch.ones(ROWS, WIDTH, requires_grad=True) for _ in range(micro_batches)]
            for x in nl.accumulate(model, inputs, weight=len):
                model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        reports.append(memory.report)
    return reports


BLOCK = 2 * WIDTH * INNER + WIDTH + INNER
ROOT = 5 * WIDTH + 5
PARAMETERS = LAYERS * BLOCK + ROOT


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_report_counts_every_part_exactly(micro_batches):
    ((first, second),) = nl.spmd.run(measured, 1, args=({}, micro_batches))
    assert first.mine == second.mine
    found = first.mine
    assert found["parameters"] == found["gradients"] == 4 * PARAMETERS
    counts_of_steps = 4 * (4 * LAYERS + 2)
    assert found["optimizer"] == 2 * 4 * PARAMETERS + counts_of_steps
    # each layer saves its input, its hidden activation and the square, once
    assert found["activations"] == 4 * LAYERS * ROWS * (WIDTH + 2 * INNER)
    # the head saves its input, and its output for the square
    assert found["logits"] == 4 * ROWS * (WIDTH + 5)
    assert found["gathered"] == 0  # one rank computes with its own parameters
    assert first.total == sum(found.values()) == first.most["total"]


def test_report_of_sharded_parameters():
    config = {"hybrid_shard_degree": 2, "sdp_max_live_parameters": 0}
    for report, _ in nl.spmd.run(measured, 4, args=(config,)):
        # The head's 5 rows are padded to 6.
        assert report.mine["parameters"] == 4 * (PARAMETERS + WIDTH + 1) / 2
        assert report.mine["activations"] == 4 * LAYERS * ROWS * (WIDTH + 2 * INNER)
        padded = ROOT + WIDTH + 1
        assert 4 * (BLOCK + padded) <= report.mine["gathered"] < 4 * (LAYERS * BLOCK + padded)


def test_report_has_the_maximum_over_ranks():
    def uneven(rank):
        nl.init({})
        with nl.spmd.one_at_a_time(seed=0):
            model = nl.shard(Tower())
        optimizer = torch.optim.AdamW(model.parameters())
        with nl.memory_report(model, optimizer) as memory:
            for x in nl.accumulate(model, [torch.ones(1 + rank, WIDTH)], weight=len):
                model(x).backward()
            optimizer.step()
        return memory.report

    small, large = nl.spmd.run(uneven, 2)
    assert small.mine["activations"] < large.mine["activations"]
    assert small.most == large.most
    assert small.most["activations"] == large.mine["activations"]


def test_saved_tensors_count_storages_once_until_freed():
    saved = SavedTensors(lambda: "any")
    weight = nn.Parameter(torch.ones(10, 10))
    saved.exclude([weight])
    with saved:
        x = torch.ones(10, 10, requires_grad=True) + 0
        y = x @ weight.t()  # saves x
        z = (y * y.t()).sum()  # y, twice
        other = (x * x).sum()
        del x
        assert saved.now["any"] == 2 * 400
        z.backward()
        assert saved.now["any"] == 2 * 400  # the variable y still holds it
        del y, z
        assert saved.now["any"] == 400  # x, for the remaining product
        del other
    assert saved.now["any"] == 0 and saved.peak["any"] == 2 * 400


def checkpointed():
    """Build a tower that recomputes its layers."""

    class Checkpointed(Tower):
        def forward(self, x):
            x = x + 0
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return self.head(x).square().sum()

    return Checkpointed()


def test_report_includes_recomputed_activations():
    ((found, _),) = nl.spmd.run(measured, 1, args=({}, 1, checkpointed))
    one_block = 2 * INNER  # hidden activations during recomputation
    assert found.mine["activations"] == 4 * ROWS * (LAYERS * WIDTH + one_block)


def test_report_excludes_offloaded_activations():
    class Offloaded(Tower):
        def forward(self, x):
            with torch.autograd.graph.save_on_cpu():
                for layer in self.layers:
                    x = layer(x)
            return self.head(x).square().sum()

    ((found, _),) = nl.spmd.run(measured, 1, args=({}, 1, Offloaded))
    assert found.mine["activations"] == 0 and found.mine["logits"] > 0


def beside_live_storages(rank, strategy, horizon):
    """Return the report of GPT-2's third step, and its peak bytes of live activations."""
    nl.init({})
    shape = {"n_embd": 64, "n_layer": 6, "n_head": 4, "vocab_size": 32, "n_positions": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with nl.spmd.one_at_a_time(seed=0):
        model = GPT2LMHeadModel(GPT2Config(**shape, **dropout, bos_token_id=0, eos_token_id=0))
    nl.shard(model)
    if strategy:
        nl.checkpoint_activations(model, strategy)
    if horizon:
        nl.offload_activations(model, horizon, smallest=1)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(4, 64, dtype=torch.long)
    for _ in range(3):  # the first step measures the budget and allocates host memory
        live = LiveStorages()
        with nl.memory_report(model, optimizer) as memory:
            for batch in nl.accumulate(model, [{"input_ids": ids, "labels": ids}]):
                with live:
                    model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return memory.report, live.peak


@pytest.mark.parametrize("strategy", [None, "each", "group_2", "contiguous", "selective", "5MiB"])
def test_reported_activations_match_live_storages(strategy):
    ((report, alive),) = nl.spmd.run(beside_live_storages, 1, args=(strategy, 0))
    # live storages include two hidden states of the running operator
    assert alive / 1.06 < report.mine["activations"] <= alive


@pytest.mark.parametrize("strategy", [None, "each", "selective"])
def test_reported_offloaded_activations_match_live_storages(strategy):
    ((report, alive),) = nl.spmd.run(beside_live_storages, 1, args=(strategy, 1))
    assert alive / 1.06 < report.mine["activations"] <= alive


def test_communication_buffers_of_the_largest_unit():
    assert communication_bytes(1000, 4, prefetch_depth=2) == 1000 * (4 + 3 * 4 + 4)


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, {"tensor_parallel_degree": 2}),
        (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
        (2, {"context_parallel_degree": 2}),
    ],
    ids=str,
)
def test_report_of_model_parallel_ranks(ranks, config):
    def on_rank(rank, config):
        mesh = nl.init(config)
        with nl.spmd.one_at_a_time(seed=0):
            model = parity.build("llama")
        model = nl.transform(model)
        model = nl.shard(nl.pipeline(model) if mesh.pipeline > 1 else model)
        optimizer = torch.optim.AdamW(model.parameters())
        with nl.memory_report(model, optimizer) as memory:
            for batch in nl.accumulate(model, [parity.rows(0)]):
                parity.forward_and_backward(model, batch)
            optimizer.step()
        return memory.report

    (alone,) = nl.spmd.run(on_rank, 1, args=({},))
    for report in nl.spmd.run(on_rank, ranks, args=(config,)):
        for part in ("parameters", "gradients", "optimizer"):
            assert 0.4 < report.mine[part] / alone.mine[part] < 0.75, part
        # the last stage holds half the layers and one micro-batch at a time
        assert 0.2 < report.mine["activations"] / alone.mine["activations"] < 0.75


@pytest.mark.slow
def test_report_of_compiled_blocks():
    def compiled():
        return nl.compile_blocks(Tower(), backend="aot_eager")

    ((plain, _),) = nl.spmd.run(measured, 1, args=({},))
    ((found, _),) = nl.spmd.run(measured, 1, args=({}, 2, compiled))
    assert 0 < found.mine["activations"] <= plain.mine["activations"]
    assert {k: v for k, v in found.mine.items() if k != "activations"} == {
        k: v for k, v in plain.mine.items() if k != "activations"
    }


def test_report_raises_for_misuse():
    def wrong(rank):
        nl.init()
        with pytest.raises(nl.errors.NearlinearError, match="sharded by nl.shard"):
            nl.memory_report(Tower(), None)
        model = nl.shard(Tower())
        with pytest.raises(nl.errors.NearlinearError, match="no step has run"):
            with nl.memory_report(model, torch.optim.AdamW(model.parameters())):
                pass

    nl.spmd.run(wrong, 1)


def test_table_and_figure_show_every_part():
    ((report, _),) = nl.spmd.run(measured, 1, args=({},))
    lines = str(report).splitlines()
    assert len(lines) == 1 + 7 + 1
    assert "parameters, sharded" in lines[1] and "total" in lines[8]
    ax = plots.memory(json.loads(json.dumps(report.as_dict())))
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert len(ax.patches) == len(labels) == 7
    assert ax.patches[3].get_width() == pytest.approx(report.mine["activations"] / 2**20)
    assert ax.lines[3].get_xdata()[0] == pytest.approx(report.most["activations"] / 2**20)


def train(rank, data, settings):
    return nl.Trainer(train_config.load(data, settings, environment={})).fit()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_run_prints_and_saves_one_report(small_run, tmp_path, capsys, precision):
    """In float16, the first steps overflow and have no gradients."""
    settings = ["train.eval_sequences=0", "train.sample_tokens=0", f"parallel.{precision}=true"]
    settings += ["parallel.init_scale=1e9"] if precision == "fp16" else []
    settings += ["train.steps=16"]
    nl.spmd.run(train, 2, args=(small_run, settings))
    assert capsys.readouterr().out.count("memory of a step, MiB") == 1
    report = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert report["mine"]["gradients"] == report["mine"]["parameters"] > 0
    assert report["mine"]["optimizer"] > 2 * report["mine"]["gradients"]
    assert plots.save_memory(tmp_path / "run").read_bytes().startswith(b"\x89PNG")


def test_run_without_memory_report(small_run, tmp_path, capsys):
    settings = ["run.memory_report=false", "train.steps=1", "train.eval_sequences=0"]
    nl.spmd.run(train, 1, args=(small_run, settings))
    assert "memory of a step" not in capsys.readouterr().out
    assert not (tmp_path / "run" / "memory.json").exists()


IN_A_PROCESS = """
from pathlib import Path
import torch, nearlinear as nl
from transformers import GPT2Config, GPT2LMHeadModel

def kib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])

def train(width, layers, rows, steps):
    config = GPT2Config(vocab_size=1000, n_embd=width, n_layer=layers, n_head=4, n_positions=256,
                        bos_token_id=0, eos_token_id=0, use_cache=False)
    model = nl.shard(GPT2LMHeadModel(config))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(rows, 256, dtype=torch.long)
    for _ in range(steps):
        with nl.memory_report(model, optimizer) as memory:
            for batch in nl.accumulate(model, [{"input_ids": ids, "labels": ids}]):
                model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, memory

nl.init()
train(64, 1, 1, 1)  # warm-up allocations of libraries
before = kib("VmRSS")
model, optimizer, memory = train(512, 4, 2, 2)
print((kib("VmHWM") - before) * 1024 / memory.report.total)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_report_matches_process_growth():
    """The report is within 20 % of a growth of about 450 MiB."""
    done = subprocess.run([sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0.8 < float(done.stdout) < 1.2


@pytest.mark.gpu
def test_gpu_report_includes_other():
    report, _ = nl.spmd.run(measured, 1, args=({},), processes=True)[0]
    assert report.mine["other"] > 0
