"""Per-rank metrics identify a slow rank by its own time, which step times do not show."""

import json
import threading
import time

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

import nearlinear as nl
from nearlinear.config import train as train_config
from nearlinear.distributed import collectives, thread_backend
from nearlinear.distributed.collectives import count_collectives
from nearlinear.train import trainer as trainer_module
from nearlinear.train.callbacks import TrainStep, rank_monitor
from nearlinear.train.metrics import METRIC_PATTERNS

SLOW = 2
DELAY = 64.0  # seconds per batch or per micro-batch
WAIT = 1.0  # seconds in every collective


class Clock(threading.local):
    """A clock per thread rank that only `advance` moves, so that sums are exact."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


class SlowLoader:
    """A loader that delays every batch."""

    def __init__(self, inner, sleep):
        self.inner, self.sleep = inner, sleep

    def __next__(self):
        self.sleep()
        return next(self.inner)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def slow_down(trainer, where, sleep):
    inside = trainer.model.transformer.h[1].mlp
    if where == "loader":
        trainer.loader = SlowLoader(trainer.loader, sleep)
    elif where == "forward":
        inside.register_forward_pre_hook(lambda *_: sleep())
    elif where == "backward":
        inside.register_full_backward_pre_hook(lambda *_: sleep())


def train(rank, data, settings, slow=None, sleep=None):
    """Train with delays; ``slow`` maps slow ranks to the part of the step that is slow."""
    trainer = nl.Trainer(train_config.load(data, settings, environment={}))
    slow_down(trainer, (slow or {}).get(rank), sleep)
    trainer.fit()


def rows(data, settings=(), processes=False, **options):
    def rank_of(rank):
        train(rank, data, settings, **options)

    nl.spmd.run(rank_of, 4, processes=processes)
    with open(f"{data['run']['folder']}/metrics.jsonl") as file:
        return [json.loads(row) for row in file]


@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize("where", ["loader", "forward", "backward"])
def test_only_the_slow_rank_shows_the_delay(small_run, where, overlap, monkeypatch):
    """The other ranks wait in collectives, which are outside of the timed spans."""
    clock = Clock()

    def report(*collective):
        clock.advance(WAIT)
        collectives.report_collective(*collective)

    monkeypatch.setattr(rank_monitor, "time", clock)
    monkeypatch.setattr(thread_backend, "report_collective", report)
    settings = [f"parallel.overlap_communication={overlap}", "parallel.hybrid_shard_degree=2"]
    settings += ["parallel.sdp_max_live_parameters=0", "model.overrides.n_layer=3"]  # many gathers
    found = rows(small_run, settings, slow={SLOW: where}, sleep=lambda: clock.advance(DELAY))
    nobody = [0.0] * 4
    late = [DELAY if rank == SLOW else 0.0 for rank in range(4)]
    for row in found:
        if where == "loader":
            assert row["load_seconds"] == late and row["compute_seconds"] == nobody
        else:  # two micro-batches
            assert row["compute_seconds"] == [2 * d for d in late] and row["load_seconds"] == nobody
        assert min(row["step_seconds"]) >= 10 * WAIT


def sleep_long():
    time.sleep(0.5)


@pytest.mark.slow
def test_slow_ranks_are_found_on_processes(small_run):
    """The other processes wait in gloo collectives."""
    slow = {1: "forward", 2: "backward"}
    settings = ["parallel.hybrid_shard_degree=2", "train.steps=3"]
    found = rows(small_run, settings, processes=True, slow=slow, sleep=sleep_long)
    for row in found:
        assert min(row["step_seconds"]) > 2 * 0.5  # every rank has waited
    own = np.median([row["compute_seconds"] for row in found], axis=0)
    assert {rank for rank in range(4) if own[rank] > 2 * 0.5} == slow.keys()


def test_logged_steps_have_metrics_of_every_rank(small_run):
    """Other steps have none. The arrays appear in the JSON lines, not in the text lines."""
    found = rows(small_run, ["run.log_every=2"])
    assert [row["step"] for row in found] == [2, 3, 4, 6]  # 3: evaluated
    for row in found:
        assert ("step_seconds" in row) == (row["step"] % 2 == 0)
        for name in rank_monitor.RANK_METRICS if "step_seconds" in row else ():
            assert len(row[name]) == 4 and min(row[name]) >= 0
    last = found[-1]
    assert last["mem_gib_by_rank"][0] == pytest.approx(last["mem_gib"], rel=0.1)
    assert not set(rank_monitor.RANK_METRICS) & set(METRIC_PATTERNS)


def test_about_file_lists_the_hosts(small_run, monkeypatch):
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-1-" + "x" * 100)
    rows(small_run)
    with open(f"{small_run['run']['folder']}/about.json") as file:
        about = json.load(file)
    assert about["hosts"] == [("algo-1-" + "x" * 100)[: trainer_module.HOST_NAME_BYTES]] * 4
    assert about["steps"] == 6 and about["tokens_per_step"] == 4 * 2 * 2 * 32


def test_rank_timing_adds_no_collective(small_run):
    """A logged step has as many collectives as any other."""

    def count(rank):
        settings = ["run.log_every=2", "run.tensorboard=false"]
        trainer = nl.Trainer(train_config.load(small_run, settings, environment={}))
        trainer.step(), trainer.step()
        calls = []
        for _ in range(2):
            with count_collectives() as counted:
                trainer.step()
            calls.append((dict(counted.calls), counted.bytes["all_reduce"]))
        trainer.reporter.close()
        return calls

    (silent, few), (reported, more) = nl.spmd.run(count, 4)[0]
    assert reported == silent
    assert more - few == 4 * len(rank_monitor.RANK_METRICS) * 8  # bytes


def test_sum_and_gather_uses_one_all_reduce():
    def work(rank):
        totals = torch.tensor([1.0, rank], dtype=torch.float64)
        own = {"a": 10.0 * rank, "b": 0.1}
        with count_collectives() as counted:
            gathered = trainer_module.sum_and_gather(totals, own)
        assert dict(counted.calls) == {"all_reduce": 1}
        return gathered, trainer_module.sum_and_gather(totals, {})

    for with_numbers, without in nl.spmd.run(work, 3):
        assert with_numbers == ([3.0, 3.0], {"a": [0.0, 10.0, 20.0], "b": [0.1, 0.1, 0.1]})
        assert without == ([3.0, 3.0], {})


class Ticking(torch.nn.Module):
    """A block whose forward pass advances a clock by one second."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def forward(self, inputs):
        self.now += 1.0
        return inputs * inputs


LOGGED = TrainStep(number=1, updates=0, logged=True)


def seconds(timing):
    """Return the step, load and compute seconds of ``timing``."""
    metrics = timing.rank_metrics(LOGGED)
    return tuple(metrics[name] for name in rank_monitor.RANK_METRICS[:3])


@pytest.fixture
def ticking(monkeypatch):
    """Return such a block, and the callback that times it, in a logged step."""
    block = Ticking()
    monkeypatch.setattr(rank_monitor, "time", block)
    timing = rank_monitor.RankTiming([block], torch.device("cpu"))
    timing.on_step_begin(LOGGED)
    timing.on_data_loaded(LOGGED)
    return block, timing


def test_recomputed_block_is_timed_once(ticking):
    """Activation checkpointing repeats the forward pass of a block inside its backward pass."""
    block, timing = ticking
    inputs = torch.ones(1, requires_grad=True) * 1.0
    torch.utils.checkpoint.checkpoint(block, inputs, use_reentrant=False).sum().backward()
    assert seconds(timing) == (2.0, 0.0, 2.0)
    timing.on_step_begin(LOGGED)
    assert seconds(timing) == (0.0, 0.0, 0)


def test_evaluation_is_not_timed(ticking):
    block, timing = ticking
    with torch.no_grad():
        block(torch.ones(1))
    assert seconds(timing) == (1.0, 0.0, 0)


@pytest.mark.gpu
def test_rank_timing_on_a_gpu(small_run):
    nl.spmd.run(train, 1, args=(small_run, ["parallel.bf16=true"]), processes=True)
    with open(f"{small_run['run']['folder']}/metrics.jsonl") as file:
        for row in map(json.loads, file):
            assert 0 < row["compute_seconds"][0] < row["step_seconds"][0]
