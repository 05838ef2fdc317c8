"""What every rank did: the slow one is named by its own time, which nobody's step time shows."""

import json
import threading
import time

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

import nearlinear as nl
from nearlinear import counts
from nearlinear.counts import count_collectives
from nearlinear.spmd import threads
from nearlinear.train import config as train_config
from nearlinear.train import ranks
from nearlinear.train.report import METRIC_PATTERNS

SLOW = 2
DELAY = 64.0  # that it takes for a batch, or in a micro-batch
WAIT = 1.0  # in every collective


class Clock(threading.local):
    """A clock for each rank that is a thread: only `advance` moves it, so that sums are exact."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


class SlowLoader:
    """A loader whose every batch comes late."""

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
    """``slow``: for the ranks that are, where."""
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
def test_the_slow_rank_is_named_by_its_own_time_only(small_run, where, overlap, monkeypatch):
    """Others wait for it, in collectives, and not one of these is in what is timed."""
    clock = Clock()

    def report(*collective):
        clock.advance(WAIT)
        counts.report(*collective)

    monkeypatch.setattr(ranks, "time", clock)
    monkeypatch.setattr(threads, "report", report)
    settings = [f"parallel.overlap_communication={overlap}", "parallel.hybrid_shard_degree=2"]
    settings += ["parallel.sdp_max_live_parameters=0", "model.overrides.n_layer=3"]  # many gathers
    found = rows(small_run, settings, slow={SLOW: where}, sleep=lambda: clock.advance(DELAY))
    nobody = [0.0] * 4
    late = [DELAY if rank == SLOW else 0.0 for rank in range(4)]
    for row in found:
        if where == "loader":
            assert row["load_seconds"] == late and row["compute_seconds"] == nobody
        else:  # both micro-batches
            assert row["compute_seconds"] == [2 * d for d in late] and row["load_seconds"] == nobody
        assert min(row["step_seconds"]) >= 10 * WAIT


def sleep_long():
    time.sleep(0.5)


@pytest.mark.slow
def test_slow_ranks_are_named_on_real_processes(small_run):
    """Which wait for them by gloo, on threads of their own."""
    slow = {1: "forward", 2: "backward"}
    settings = ["parallel.hybrid_shard_degree=2", "train.steps=3"]
    found = rows(small_run, settings, processes=True, slow=slow, sleep=sleep_long)
    for row in found:
        assert min(row["step_seconds"]) > 2 * 0.5  # all have waited
    own = np.median([row["compute_seconds"] for row in found], axis=0)
    assert {rank for rank in range(4) if own[rank] > 2 * 0.5} == slow.keys()


def test_every_rank_is_told_of_in_the_steps_that_are_reported(small_run):
    """And in no other; the arrays are in the JSON lines, not in the text that CloudWatch reads."""
    found = rows(small_run, ["run.log_every=2"])
    assert [row["step"] for row in found] == [2, 3, 4, 6]  # 3: evaluated
    for row in found:
        assert ("step_seconds" in row) == (row["step"] % 2 == 0)
        for name in ranks.COLUMNS if "step_seconds" in row else ():
            assert len(row[name]) == 4 and min(row[name]) >= 0
    last = found[-1]
    assert last["mem_gib_by_rank"][0] == pytest.approx(last["mem_gib"], rel=0.1)
    assert not set(ranks.COLUMNS) & set(METRIC_PATTERNS)


def test_the_hosts_are_written_once(small_run, monkeypatch):
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-1-" + "x" * 100)
    rows(small_run)
    with open(f"{small_run['run']['folder']}/about.json") as file:
        about = json.load(file)
    assert about["hosts"] == [("algo-1-" + "x" * 100)[: ranks.HOST_BYTES]] * 4
    assert about["steps"] == 6 and about["tokens_per_step"] == 4 * 2 * 2 * 32


def test_it_costs_no_collective(small_run):
    """What a step sends is the same, in number, whether it is reported or not."""

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
    assert more - few == 4 * len(ranks.COLUMNS) * 8  # bytes


def test_add_up_gives_sums_and_everybodys_numbers():
    def work(rank):
        totals = torch.tensor([1.0, rank], dtype=torch.float64)
        return ranks.add_up(totals, [10.0 * rank, 0.1]), ranks.add_up(totals, [])

    for with_numbers, without in nl.spmd.run(work, 3):
        assert with_numbers == ([3.0, 3.0], [[0.0, 10.0, 20.0], [0.1, 0.1, 0.1]])
        assert without == ([3.0, 3.0], [])


class Ticking(torch.nn.Module):
    """A block whose forward takes one tick of a clock that nothing else moves."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def forward(self, inputs):
        self.now += 1.0
        return inputs * inputs


@pytest.fixture
def ticking(monkeypatch):
    """A block of that kind, and what times it."""
    block = Ticking()
    monkeypatch.setattr(ranks, "time", block)
    own = ranks.OwnTime([block], torch.device("cpu"))
    own.begin_step(watching=True)
    return block, own


def test_a_recomputed_block_is_counted_once(ticking):
    """Gradient checkpointing runs a block's forward again inside its backward."""
    block, own = ticking
    inputs = torch.ones(1, requires_grad=True) * 1.0
    torch.utils.checkpoint.checkpoint(block, inputs, use_reentrant=False).sum().backward()
    assert own.take() == (2.0, 0.0, 2.0)
    own.begin_step(watching=True)
    assert own.take() == (0.0, 0.0, 0)


def test_an_evaluation_is_not_timed(ticking):
    block, own = ticking
    with torch.no_grad():
        block(torch.ones(1))
    assert own.take() == (1.0, 0.0, 0)


@pytest.mark.gpu
def test_on_a_gpu(small_run):
    nl.spmd.run(train, 1, args=(small_run, ["parallel.bf16=true"]), processes=True)
    with open(f"{small_run['run']['folder']}/metrics.jsonl") as file:
        for row in map(json.loads, file):
            assert 0 < row["compute_seconds"][0] < row["step_seconds"][0]
