"""Checkpoints that are written while training goes on: whole, of one moment, or not there."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import nearlinear as nl
from nearlinear import _torch, runtime
from nearlinear.checkpoint import file, index, kept, meeting, saving, snapshot
from nearlinear.checkpoint.snapshot import Snapshot
from nearlinear.checkpoint.stream import DTYPES, bytes_of
from nearlinear.errors import CheckpointError
from nearlinear.spmd.failures import RankError
from nearlinear.train import keeper
from tests.support import tiny


def trained(rank: int, steps: int = 2):
    nl.init({"hybrid_shard_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.MODELS["gpt2"]()
    model = nl.shard(model)
    updates = tiny.optimizer_for(model, "adamw")
    for step in range(steps):
        one_step(model, updates, step)
    return model, updates


def one_step(model, updates, step: int) -> None:
    model(**tiny.batch(tiny.rows(step, 2))).loss.backward()
    updates.step()
    updates.zero_grad()


def values(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}


class Gate:
    """Lets files be written once it is opened."""

    def __init__(self, monkeypatch, error: Exception | None = None, name: str = "rank-"):
        self.open, write = threading.Event(), file.write

        def wait_and_write(path, tensors):
            assert self.open.wait(60)
            if error is not None and path.name.startswith(name):
                raise error
            return write(path, tensors)

        monkeypatch.setattr(file, "write", wait_and_write)


def test_it_is_of_the_moment_it_was_asked_for(monkeypatch, tmp_path):
    """Training goes on, and changes everything, before the first byte is written."""
    gate = Gate(monkeypatch)

    def work(rank):
        model, updates = trained(rank)
        before = values(model)
        started = nl.save(tmp_path, model, updates, step=2)
        one_step(model, updates, 2)
        after = values(model)
        assert not started.done and not (tmp_path / index.NAME).exists()
        dist.barrier()
        gate.open.set()
        started.wait()
        nl.load(tmp_path, model, updates)
        found = values(model)
        assert all(found[name].equal(value) for name, value in before.items())
        assert not all(found[name].equal(value) for name, value in after.items())

    nl.spmd.run(work, 4)


class Counting(nn.Module):
    """Counts in a buffer how often it was called."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, values):
        self.calls += 1
        return self.linear(values)


def test_with_overlap_a_pass_goes_on_and_the_optimizers_step_waits_for_the_copy(
    monkeypatch, tmp_path
):
    may_copy, copy = threading.Event(), snapshot.Copy.complete

    def wait_and_copy(self):
        assert may_copy.wait(60)
        return copy(self)

    monkeypatch.setattr(snapshot.Copy, "complete", wait_and_copy)

    def work(rank):
        nl.init({})
        with nl.spmd.one_at_a_time(seed=0):
            model = Counting()
        updates = torch.optim.AdamW(model.parameters(), lr=0.1)

        def forward_and_backward():
            model(torch.ones(2, 4)).sum().backward()

        forward_and_backward()
        updates.step()
        before = [p.detach().clone() for p in model.parameters()]
        moments = updates.state[model.linear.weight]["exp_avg"].clone()
        started = nl.save(tmp_path, model, updates, overlap=True)
        forward_and_backward()
        assert model.calls == 2 and not may_copy.is_set()
        threading.Timer(0.2, may_copy.set).start()
        updates.step()
        assert may_copy.is_set()
        started.wait()
        nl.load(tmp_path, model, updates)
        assert model.calls == 1
        assert all(p.equal(was) for p, was in zip(model.parameters(), before, strict=True))
        assert updates.state[model.linear.weight]["exp_avg"].equal(moments)
        for _ in range(2):  # and with the save after it
            started = nl.save(tmp_path, model, updates, overlap=True)
            updates.step()
        started.wait()
        assert len(updates._optimizer_step_pre_hooks) == 1

    nl.spmd.run(work, ranks=1)


def test_the_next_save_loading_and_leaving_wait_for_it(tmp_path):
    def work(rank):
        model, updates = trained(rank)
        one = nl.save(tmp_path / "one", model, updates)
        two = nl.save(tmp_path / "two", model, updates)
        assert one.done
        nl.load(tmp_path / "two", model, updates)
        assert two.done
        nl.save(tmp_path / "three", model, updates)

    nl.spmd.run(work, 2)
    assert index.read(tmp_path / "three").files.keys() == index.read(tmp_path / "one").files.keys()


def test_wait_is_when_it_is_there(tmp_path):
    def work(rank):
        model, updates = trained(rank)
        return nl.save(tmp_path, model, updates, wait=True).done, index.read(tmp_path).step

    assert nl.spmd.run(work, 2) == [(True, 0)] * 2


@pytest.mark.parametrize("then", ["wait", "save", "load", "leave"])
def test_a_rank_that_cannot_write_is_named_on_all_ranks(monkeypatch, tmp_path, then):
    gate = Gate(monkeypatch, OSError(28, "No space left on device"), "rank-00001")
    gate.open.set()

    def work(rank):
        model, updates = trained(rank)
        started = nl.save(tmp_path / "lost", model, updates)
        with pytest.raises(CheckpointError, match="rank 1 cannot write .*No space left"):
            if then == "wait":
                started.wait()
            elif then == "save":
                nl.save(tmp_path / "next", model, updates)
            elif then == "load":
                nl.load(tmp_path / "lost", model, updates)
            else:
                runtime.shutdown()
        assert not (tmp_path / "lost" / index.NAME).exists()

    nl.spmd.run(work, 2)


def mute(monkeypatch, gone: int) -> None:
    """Nothing of what rank ``gone`` says gets through."""
    for name in ("tell", "announce"):
        say = getattr(meeting.Meeting, name)
        monkeypatch.setattr(
            meeting.Meeting,
            name,
            lambda self, *words, say=say: self.rank == gone or say(self, *words),
        )


def test_nobody_waits_long_for_a_rank_that_is_gone(monkeypatch, tmp_path):
    """Rank 1 never says that it has written: rank 0 has met with an error, and gives up."""
    mute(monkeypatch, 1)

    def work(rank):
        model, updates = trained(rank)
        started = nl.save(tmp_path, model, updates)
        started.abandon(seconds=0.2)
        with pytest.raises(CheckpointError, match="was not heard of, so this checkpoint is not"):
            saving.finish()

    nl.spmd.run(work, 2)
    assert not (tmp_path / index.NAME).exists()


@pytest.mark.parametrize("gone", [0, 1, 3])
def test_nobody_waits_for_a_rank_that_is_known_to_be_dead(monkeypatch, tmp_path, gone):
    mute(monkeypatch, gone)

    def work(rank):
        model, updates = trained(rank)
        started = nl.save(tmp_path, model, updates)
        started.abandon(nl.RankLost("it has died", gone=gone), seconds=10_000)
        with pytest.raises(CheckpointError, match=f"rank {gone} was not heard of"):
            started.wait()

    nl.spmd.run(work, 4, timeout=100)
    assert not (tmp_path / index.NAME).exists()


def test_a_dead_rank_that_had_written_all_takes_no_checkpoint_with_it(tmp_path):
    def work(rank):
        model, updates = trained(rank)
        started = nl.save(tmp_path, model, updates)
        if rank == 1:
            started.wait()
        dist.barrier()
        started.abandon(nl.RankLost("it has died", gone=1))
        started.wait()

    nl.spmd.run(work, 2)
    assert (tmp_path / index.NAME).exists()


def test_the_newest_is_pointed_at_once_it_is_there(tmp_path):
    def work(rank):
        model, updates = trained(rank)
        for step in range(1, 5):
            kept.keep(tmp_path, 2, step, model, updates)

    nl.spmd.run(work, 2)
    assert (tmp_path / kept.LATEST).read_text() == "step-00000004\n"
    assert kept.steps(tmp_path) == [3, 4]


def test_nothing_is_left_in_the_jobs_store_but_the_last_words(tmp_path):
    def work(rank):
        model, updates = trained(rank)
        before = _torch.job_store().num_keys()
        sizes = []
        for step in range(3):
            nl.save(tmp_path / str(step), model, updates).wait()
            dist.barrier()
            sizes.append(_torch.job_store().num_keys() - before)
            dist.barrier()
        return sizes

    assert nl.spmd.run(work, 2)[0] == [2, 2, 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_file_is_what_the_library_reads(tmp_path, dtype):
    bits = torch.arange(48, dtype=torch.uint8).clamp(max=1 if dtype is torch.bool else 255)
    tensors = {"some": bits.view(dtype), "empty": bits.view(dtype)[:0], "word": torch.tensor(3)}
    found = file.write(tmp_path / "a.safetensors", tensors)
    assert index.digest(tmp_path / "a.safetensors") == found
    with safe_open(tmp_path / "a.safetensors", "pt") as values:
        assert set(values.keys()) == tensors.keys()
        for name, tensor in tensors.items():
            there = values.get_tensor(name)
            assert there.dtype == tensor.dtype and there.shape == tensor.shape
            assert bytes_of(there) == bytes_of(tensor)


def test_a_number_of_no_such_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="odd is torch.complex128, which safetensors"):
        file.write(tmp_path / "a", {"odd": torch.zeros(1, dtype=torch.complex128)})
    assert not list(tmp_path.iterdir())


SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6)


@settings(max_examples=25, deadline=None)
@given(shapes=SHAPES, chunk=st.integers(1, 64))
def test_files_of_any_shapes(tmp_path_factory, shapes, chunk):
    kinds = [torch.float32, torch.bfloat16, torch.int8]
    tensors = {
        f"t{n}": torch.randn(shape).mul(9).to(kinds[n % 3]) for n, shape in enumerate(shapes)
    }
    path = tmp_path_factory.mktemp("file") / "a.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "CHUNK", chunk)
        assert file.write(path, tensors) == index.digest(path)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(found[name].equal(tensor) for name, tensor in tensors.items())


def test_host_memory_is_used_again_where_it_fits():
    memory, state = Snapshot(), {"a": torch.ones(8), "b": torch.ones(3)[::2]}
    first = {name: copy.data_ptr() for name, copy in memory.of(state).complete().items()}
    state["a"] += 1
    second = memory.of(state).complete()
    assert {name: copy.data_ptr() for name, copy in second.items()} == first
    assert second["a"].equal(state["a"]) and second["b"].is_contiguous()
    grown = memory.of({"a": torch.ones(9)}).complete()
    assert grown.keys() == {"a"} and grown["a"].equal(torch.ones(9))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch finds none here")
def test_on_a_gpu_what_changes_a_tensor_waits_for_its_copy():
    size = 2**26
    now, later = (torch.ones(size, device="cuda") for _ in range(2))
    copy = Snapshot().of({"now": now, "later": later}, later={"later"})
    now += 1
    copy.hold()
    later += 1
    found = copy.complete()
    assert all(value.is_pinned() and value.eq(1).all() for value in found.values())


def test_what_json_cannot_carry_is_refused_at_once(tmp_path):
    class Scheduler:
        def state_dict(self):
            return {"when": {1, 2}}

    def work(rank):
        model, updates = trained(rank)
        with pytest.raises(CheckpointError, match=r"scheduler.state_dict\(\) has what JSON cannot"):
            nl.save(tmp_path / "a", model, updates, scheduler=Scheduler())

    nl.spmd.run(work, 2)


def test_a_run_ends_when_a_checkpoint_cannot_be_written(monkeypatch, small_run, tmp_path):
    """Some steps later, on all ranks, with the reason; the checkpoint before it is as it was."""
    write = file.write

    def full_at_four(path, tensors):
        if path.parent.name == "step-00000004":
            raise OSError(28, "No space left on device")
        return write(path, tensors)

    monkeypatch.setattr(file, "write", full_at_four)
    small_run["checkpoint"] = {"folder": str(tmp_path / "kept"), "every": 2}
    small_run["train"] |= {"steps": 500, "eval_sequences": 0, "sample_tokens": 0}

    def work(rank):
        trainer = nl.Trainer(small_run)
        step = trainer.step
        trainer.step = lambda: (time.sleep(0.02), step())[1]
        trainer.fit()

    with pytest.raises(RankError, match="cannot write .*step-00000004.*No space left"):
        nl.spmd.run(work, 2)
    assert kept.steps(tmp_path / "kept") == [2]


def test_checkpoints_by_the_clock(monkeypatch, small_run, tmp_path):
    """Of whichever rank's minutes are over first, after the same step on all of them."""
    now = iter(range(0, 10_000, 10))  # every look at the clock takes ten seconds
    monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic=lambda: next(now)))
    small_run["checkpoint"] = {"folder": str(tmp_path / "kept"), "every_minutes": 1.0, "keep": 9}
    small_run["train"] |= {"steps": 9, "eval_sequences": 0, "sample_tokens": 0}
    nl.spmd.run(lambda rank: nl.Trainer(small_run).fit().steps, 2)
    saved = kept.steps(tmp_path / "kept")
    assert len(saved) >= 3 and saved[-1] == 9 and 1 not in saved
