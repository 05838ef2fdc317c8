"""The memory report: its parts against counts made otherwise, its estimates, and who shows it."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import nearlinear as nl
from nearlinear import plots
from nearlinear.memory import savings, states
from nearlinear.memory.measure import communication
from nearlinear.memory.saved import SavedTensors
from nearlinear.mesh import Mesh
from nearlinear.parallel.activations import strategy
from nearlinear.train import config as train_config
from tests.support import parity
from tests.support.live_storages import LiveStorages

WIDTH, INNER, ROWS, LAYERS = 8, 32, 4, 3


class Layer(nn.Module):
    """Saves its input, and what the square of its middle needs."""

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
        x = x + 0  # what it is given is not an activation
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().sum()


def measured(rank, config, micro_batches=1, build=Tower):
    """The report of a step of ``build()`` on inputs (ROWS, WIDTH); the second step's, too."""
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
def test_every_part_of_a_model_small_enough_to_count(micro_batches):
    ((first, second),) = nl.spmd.run(measured, 1, args=({}, micro_batches))
    assert first.mine == second.mine
    found = first.mine
    assert found["parameters"] == found["gradients"] == 4 * PARAMETERS
    counts_of_steps = 4 * (4 * LAYERS + 2)
    assert found["optimizer"] == 2 * 4 * PARAMETERS + counts_of_steps
    # Per layer its input, the middle and the middle's square; each once.
    assert found["activations"] == 4 * LAYERS * ROWS * (WIDTH + 2 * INNER)
    # The head's input, and its output, which the square needs.
    assert found["logits"] == 4 * ROWS * (WIDTH + 5)
    assert found["gathered"] == 4 * PARAMETERS
    assert first.total == sum(found.values()) == first.most["total"]


def test_shards_are_smaller_and_all_blocks_need_not_be_gathered():
    config = {"hybrid_shard_degree": 2, "sdp_max_live_parameters": 0}
    for report, _ in nl.spmd.run(measured, 4, args=(config,)):
        # The head's 5 rows are padded to 6.
        assert report.mine["parameters"] == 4 * (PARAMETERS + WIDTH + 1) / 2
        assert report.mine["activations"] == 4 * LAYERS * ROWS * (WIDTH + 2 * INNER)
        padded = ROOT + WIDTH + 1
        assert 4 * (BLOCK + padded) <= report.mine["gathered"] < 4 * (LAYERS * BLOCK + padded)
        assert [s.knob for s in report.savings if s.knob.startswith("hybrid")] == [
            "hybrid_shard_degree = 4"
        ]


def test_the_most_of_any_rank_is_known_to_all():
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


def test_saved_tensors_are_counted_once_and_until_their_memory_is_free():
    saved = SavedTensors(lambda: "any")
    weight = nn.Parameter(torch.ones(10, 10))
    saved.leave_out([weight])
    with saved:
        x = torch.ones(10, 10, requires_grad=True) + 0
        y = x @ weight.t()  # saves x
        z = (y * y.t()).sum()  # y, twice
        other = (x * x).sum()
        del x
        assert saved.now["any"] == 2 * 400
        z.backward()
        assert saved.now["any"] == 2 * 400  # y is a variable's, too
        del y, z
        assert saved.now["any"] == 400  # x, of the product that is left
        del other
    assert saved.now["any"] == 0 and saved.peak["any"] == 2 * 400


def checkpointed():
    """Recomputes all but the inputs of its layers."""

    class Checkpointed(Tower):
        def forward(self, x):
            x = x + 0
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return self.head(x).square().sum()

    return Checkpointed()


def test_checkpointing_is_seen_and_was_estimated():
    ((plain, _),) = nl.spmd.run(measured, 1, args=({},))
    ((found, _),) = nl.spmd.run(measured, 1, args=({}, 1, checkpointed))
    one_block = 2 * INNER  # is there again while it is recomputed
    assert found.mine["activations"] == 4 * ROWS * (LAYERS * WIDTH + one_block)
    said = {s.knob: s.bytes for s in plain.savings}['activations.checkpoint = "each"']
    assert said == plain.mine["activations"] - found.mine["activations"]


def test_offloaded_activations_are_not_on_the_device():
    class Offloaded(Tower):
        def forward(self, x):
            with torch.autograd.graph.save_on_cpu():
                for layer in self.layers:
                    x = layer(x)
            return self.head(x).square().sum()

    ((found, _),) = nl.spmd.run(measured, 1, args=({}, 1, Offloaded))
    assert found.mine["activations"] == 0 and found.mine["logits"] > 0


def beside_live_storages(rank, strategy, horizon):
    """The report of GPT-2's third step, and the most bytes of activations that were alive in it."""
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
    for _ in range(3):  # the first decides on a budget, and takes host memory
        live = LiveStorages()
        with nl.memory_report(model, optimizer) as memory:
            for batch in nl.accumulate(model, [{"input_ids": ids, "labels": ids}]):
                with live:
                    model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return memory.report, live.peak


@pytest.mark.parametrize("strategy", [None, "each", "group_2", "contiguous", "selective", "5MiB"])
def test_activations_are_what_is_alive_of_them(strategy):
    ((report, alive),) = nl.spmd.run(beside_live_storages, 1, args=(strategy, 0))
    # Beside them there are two hidden states of whatever operator computes.
    assert alive / 1.06 < report.mine["activations"] <= alive


@pytest.mark.parametrize("strategy", [None, "each", "selective"])
def test_of_offloaded_activations_those_on_the_device_count(strategy):
    ((report, alive),) = nl.spmd.run(beside_live_storages, 1, args=(strategy, 1))
    assert alive / 1.06 < report.mine["activations"] <= alive


def test_what_was_estimated_is_what_happens():
    ((plain, _),) = nl.spmd.run(beside_live_storages, 1, args=(None, 0))
    said = {s.knob: s.bytes for s in plain.savings}
    for knob, args in {
        'activations.checkpoint = "each"': ("each", 0),
        'activations.checkpoint = "selective"': ("selective", 0),
        "activations.offload = true, horizon 2": (None, 2),
    }.items():
        ((found, _),) = nl.spmd.run(beside_live_storages, 1, args=args)
        saved = plain.mine["activations"] - found.mine["activations"]
        assert said[knob] == pytest.approx(saved, rel=0.07), knob


@pytest.mark.parametrize(
    ("checkpoint", "horizon"),
    [("each", None), ("group_2", None), ("contiguous", None), ("selective", None), ("each", 1)],
)
def test_a_config_says_what_its_activations_take(checkpoint, horizon):
    ((plain, _),) = nl.spmd.run(beside_live_storages, 1, args=(None, 0))
    tokens, width = 4 * 64, 64
    block = states.BlockBytes(
        all=plain.mine["activations"] // 6,
        input=4 * tokens * width,
        products=4 * tokens * (3 + 1 + 4 + 1 + 1) * width,
    )
    ((found, _),) = nl.spmd.run(beside_live_storages, 1, args=(checkpoint, horizon))
    said = states.activations(block, 6, strategy.parse(checkpoint), horizon)
    assert said == pytest.approx(found.mine["activations"], rel=0.1)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bf16": True},
        {"hybrid_shard_degree": 2},
        {"hybrid_shard_degree": 2, "bf16": True, "shard_optimizer_state": True},
        {"hybrid_shard_degree": 1, "shard_optimizer_state": True},
    ],
    ids=str,
)
def test_a_config_says_what_its_states_take(config):
    def on_rank(rank):
        mesh = nl.init(config)
        with nl.spmd.one_at_a_time(seed=0):
            model = parity.build("llama")
        whole = sum(p.numel() for p in model.parameters())
        nl.shard(model)
        optimizer = nl.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
        with nl.memory_report(model, optimizer) as memory:
            for batch in nl.accumulate(model, [parity.rows(0)]):
                model(**batch).loss.backward()
            optimizer.step()
        found = sum(memory.report.mine[part] for part in ("parameters", "gradients", "optimizer"))
        said = states.state_bytes(nl.Config(**config), "adamw", mesh.world, "cpu")
        return found, said.on_rank(whole, mesh.sharing)

    for found, said in nl.spmd.run(on_rank, 4):
        assert said == pytest.approx(found, rel=0.05)


def test_states_in_8_bits_and_on_the_host_take_less():
    def said(optimizer="adamw", device="cuda", accumulation=1, **config):
        asked = states.state_bytes(nl.Config(**config), optimizer, 8, device, accumulation)
        return asked.on_rank(1024, 2)

    assert said() == 1024 * 16 // 2
    assert said("adamw_8bit") == 1024 * 8 // 2 + 2 * (512 + 2 * 4)
    assert said(offload_optimizer=True) == 0
    assert said(offload_optimizer=True, device="cpu") == said()
    shared = {"shard_optimizer_state": True}
    assert said(**shared) == 1024 * 4 // 2 + 1024 * 12 // 8
    assert said(accumulation=2, **shared) == 1024 * 8 // 2 + 1024 * 8 // 8


FACTS = savings.Facts(
    config=nl.Config(activation_loading_horizon=1, prefetch_depth=2),
    mesh=Mesh(replicate=4, shard=2),
    units=(100, 1000, 1000, 1000, 1000),
    input_bytes=50,
    products_bytes=450,
    rows=2,
    item_bytes=4,
    gradient_bytes=4,
)
PARTS = {"parameters": 8000, "gradients": 8000, "optimizer": 16000, "activations": 4000}
PARTS |= {"logits": 2000, "gathered": 16400, "communication": 5}


def test_what_knobs_would_save():
    assert {s.knob: s.bytes for s in savings.savings(PARTS, FACTS)} == {
        "hybrid_shard_degree = 4": (8000 + 8000 + 16000) // 2,
        "shard_optimizer_state = true": 16000 * 3 // 4,
        "gradients in bfloat16": 4000,
        'activations.checkpoint = "each"': 3 * (1000 - 50),
        'activations.checkpoint = "selective"': 3 * (1000 - 500),
        "activations.offload = true, horizon 1": 4000 * 2 // 4,
        "bf16 = true": (4000 + 16400) // 2,
        "micro-batch of half the size": 3000,
        "sdp_max_live_parameters = 0": 16400 - 4 * (100 + 3000),
    }
    sizes = [s.bytes for s in savings.savings(PARTS, FACTS)]
    assert sizes == sorted(sizes, reverse=True)
    assert communication(FACTS) == 1000 * (4 + 3 * 4 + 4)


def test_knobs_that_are_turned_already_are_not_named():
    turned = dataclasses.replace(
        FACTS, mesh=Mesh(shard=2), rows=1, item_bytes=2, gradient_bytes=2, input_bytes=1000
    )
    knobs = [s.knob for s in savings.savings(PARTS, turned)]
    assert knobs == ["sdp_max_live_parameters = 0", "activations.offload = true, horizon 1"]


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, {"tensor_parallel_degree": 2}),
        (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
        (2, {"context_parallel_degree": 2}),
    ],
    ids=str,
)
def test_a_split_model_has_its_part(ranks, config):
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
        # A last stage has half the layers, and one of two micro-batches at a time.
        assert 0.2 < report.mine["activations"] / alone.mine["activations"] < 0.75


@pytest.mark.slow
def test_compiled_blocks_are_measured():
    def compiled():
        return nl.compile_blocks(Tower(), backend="aot_eager")

    ((plain, _),) = nl.spmd.run(measured, 1, args=({},))
    ((found, _),) = nl.spmd.run(measured, 1, args=({}, 2, compiled))
    assert 0 < found.mine["activations"] <= plain.mine["activations"]
    assert {k: v for k, v in found.mine.items() if k != "activations"} == {
        k: v for k, v in plain.mine.items() if k != "activations"
    }


def test_mistakes_are_named():
    def wrong(rank):
        nl.init()
        with pytest.raises(nl.NearlinearError, match="sharded by nl.shard"):
            nl.memory_report(Tower(), None)
        model = nl.shard(Tower())
        with pytest.raises(nl.NearlinearError, match="no step has run"):
            with nl.memory_report(model, torch.optim.AdamW(model.parameters())):
                pass

    nl.spmd.run(wrong, 1)


def test_the_table_and_the_figure_show_every_part():
    ((report, _),) = nl.spmd.run(measured, 1, args=({},))
    lines = str(report).splitlines()
    assert len(lines) == 1 + 7 + 1 + 1 + len(report.savings)
    assert "parameters, as sharded" in lines[1] and "together" in lines[8]
    ax = plots.memory(json.loads(json.dumps(report.as_dict())))
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert len(ax.patches) == len(labels) == 7 + len(report.savings)
    assert ax.patches[3].get_width() == pytest.approx(report.mine["activations"] / 2**20)
    assert ax.lines[3].get_xdata()[0] == pytest.approx(report.most["activations"] / 2**20)


def train(rank, data, settings):
    return nl.Trainer(train_config.load(data, settings, environment={})).fit()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_says_it_once_and_keeps_it(small_run, tmp_path, capsys, precision):
    """In float16 the first steps overflow, and leave no gradients to count."""
    settings = ["train.eval_sequences=0", "train.sample_tokens=0", f"parallel.{precision}=true"]
    settings += ["parallel.init_scale=1e9"] if precision == "fp16" else []
    settings += ["train.steps=16"]
    nl.spmd.run(train, 2, args=(small_run, settings))
    assert capsys.readouterr().out.count("memory of a step, MiB") == 1
    report = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert report["mine"]["gradients"] == report["mine"]["parameters"] > 0
    assert report["mine"]["optimizer"] > 2 * report["mine"]["gradients"]
    assert plots.save_memory(tmp_path / "run").read_bytes().startswith(b"\x89PNG")


def test_a_run_can_leave_it_out(small_run, tmp_path, capsys):
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
train(64, 1, 1, 1)  # what libraries take once
before = kib("VmRSS")
model, optimizer, memory = train(512, 4, 2, 2)
print((kib("VmHWM") - before) * 1024 / memory.report.total)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_explains_what_a_process_has_grown_by():
    """By at most a fifth less or more: 450 MiB of states, activations and buffers."""
    done = subprocess.run([sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0.8 < float(done.stdout) < 1.2


@pytest.mark.gpu
def test_on_a_gpu_the_parts_add_up_to_the_allocators_peak():
    report, _ = nl.spmd.run(measured, 1, args=({},), processes=True)[0]
    assert report.mine["other"] > 0
