"""Background saves: consistent state, failed and dead ranks, staging copies, written files."""

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
from nearlinear import _torch
from nearlinear.checkpoint import async_writer, index, safetensors_file, save
from nearlinear.checkpoint.async_writer import StagedCopy, StagingBuffers
from nearlinear.checkpoint.safetensors_file import DTYPES, tensor_bytes
from nearlinear.distributed import consensus, runtime
from nearlinear.errors import CheckpointError, RankError
from nearlinear.train import checkpoint_manager
from tests.support import tiny


def build_and_train(rank: int, steps: int = 2):
    nl.init({"hybrid_shard_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.MODELS["gpt2"]()
    model = nl.shard(model)
    optimizer = tiny.optimizer_for(model, "adamw")
    for step in range(steps):
        one_step(model, optimizer, step)
    return model, optimizer


def one_step(model, optimizer, step: int) -> None:
    model(**tiny.batch(tiny.rows(step, 2))).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}


class Gate:
    """Block file writes until the gate opens, then optionally raise an error."""

    def __init__(self, monkeypatch, error: Exception | None = None, name: str = "rank-"):
        self.open, write = threading.Event(), safetensors_file.write_file

        def wait_and_write(path, *rest):
            assert self.open.wait(60)
            if error is not None and path.name.startswith(name):
                raise error
            return write(path, *rest)

        monkeypatch.setattr(safetensors_file, "write_file", wait_and_write)


def test_save_holds_the_state_at_the_time_of_the_call(monkeypatch, tmp_path):
    """Take another training step before the first byte is written."""
    gate = Gate(monkeypatch)

    def work(rank):
        model, optimizer = build_and_train(rank)
        before = values(model)
        started = nl.save(tmp_path, model, optimizer, step=2)
        one_step(model, optimizer, 2)
        after = values(model)
        assert not started.done and not (tmp_path / index.NAME).exists()
        dist.barrier()
        gate.open.set()
        started.wait()
        nl.load(tmp_path, model, optimizer)
        found = values(model)
        assert all(found[name].equal(value) for name, value in before.items())
        assert not all(found[name].equal(value) for name, value in after.items())

    nl.spmd.run(work, 4)


class CallCounter(nn.Module):
    """Linear layer that counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, values):
        self.calls += 1
        return self.linear(values)


def test_overlap_blocks_only_the_optimizer_step_until_the_copy(monkeypatch, tmp_path):
    may_copy, copy = threading.Event(), StagedCopy.complete

    def wait_and_copy(self):
        assert may_copy.wait(60)
        return copy(self)

    monkeypatch.setattr(StagedCopy, "complete", wait_and_copy)

    def work(rank):
        nl.init({})
        with nl.spmd.one_at_a_time(seed=0):
            model = CallCounter()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def forward_and_backward():
            model(torch.ones(2, 4)).sum().backward()

        forward_and_backward()
        optimizer.step()
        before = [p.detach().clone() for p in model.parameters()]
        moments = optimizer.state[model.linear.weight]["exp_avg"].clone()
        started = nl.save(tmp_path, model, optimizer, overlap=True)
        forward_and_backward()
        assert model.calls == 2 and not may_copy.is_set()
        threading.Timer(0.2, may_copy.set).start()
        optimizer.step()
        assert may_copy.is_set()
        started.wait()
        nl.load(tmp_path, model, optimizer)
        assert model.calls == 1
        assert all(p.equal(was) for p, was in zip(model.parameters(), before, strict=True))
        assert optimizer.state[model.linear.weight]["exp_avg"].equal(moments)
        for _ in range(2):  # repeated saves must not add hooks
            started = nl.save(tmp_path, model, optimizer, overlap=True)
            optimizer.step()
        started.wait()
        assert len(optimizer._optimizer_step_pre_hooks) == 1

    nl.spmd.run(work, ranks=1)


def test_next_save_load_and_shutdown_wait_for_a_pending_save(tmp_path):
    def work(rank):
        model, optimizer = build_and_train(rank)
        one = nl.save(tmp_path / "one", model, optimizer)
        two = nl.save(tmp_path / "two", model, optimizer)
        assert one.done
        nl.load(tmp_path / "two", model, optimizer)
        assert two.done
        nl.save(tmp_path / "three", model, optimizer)

    nl.spmd.run(work, 2)
    assert index.read(tmp_path / "three").files.keys() == index.read(tmp_path / "one").files.keys()


def test_wait_returns_after_the_checkpoint_is_complete(tmp_path):
    def work(rank):
        model, optimizer = build_and_train(rank)
        return nl.save(tmp_path, model, optimizer, wait=True).done, index.read(tmp_path).step

    assert nl.spmd.run(work, 2) == [(True, 0)] * 2


@pytest.mark.parametrize("then", ["wait", "save", "load", "leave"])
def test_failed_write_names_the_rank_on_all_ranks(monkeypatch, tmp_path, then):
    gate = Gate(monkeypatch, OSError(28, "No space left on device"), "rank-00001")
    gate.open.set()

    def work(rank):
        model, optimizer = build_and_train(rank)
        started = nl.save(tmp_path / "lost", model, optimizer)
        with pytest.raises(CheckpointError, match="rank 1 cannot write .*No space left"):
            if then == "wait":
                started.wait()
            elif then == "save":
                nl.save(tmp_path / "next", model, optimizer)
            elif then == "load":
                nl.load(tmp_path / "lost", model, optimizer)
            else:
                runtime.shutdown()
        assert not (tmp_path / "lost" / index.NAME).exists()

    nl.spmd.run(work, 2)


def drop_messages_of(monkeypatch, dead_rank: int) -> None:
    """Drop all barrier messages of rank ``dead_rank``."""
    for name in ("send", "publish"):
        send = getattr(consensus.StoreBarrier, name)
        monkeypatch.setattr(
            consensus.StoreBarrier,
            name,
            lambda self, *args, send=send: self.rank == dead_rank or send(self, *args),
        )


def test_abandoned_save_stops_waiting_after_the_timeout(monkeypatch, tmp_path):
    """Drop the completion message of rank 1, and abandon the save with a short timeout."""
    drop_messages_of(monkeypatch, 1)

    def work(rank):
        model, optimizer = build_and_train(rank)
        started = nl.save(tmp_path, model, optimizer)
        started.abandon(seconds=0.2)
        with pytest.raises(CheckpointError, match="rank . does not respond; earlier"):
            async_writer.finish()

    nl.spmd.run(work, 2)
    assert not (tmp_path / index.NAME).exists()


@pytest.mark.parametrize("dead_rank", [0, 1, 3])
def test_abandoned_save_does_not_wait_for_a_dead_rank(monkeypatch, tmp_path, dead_rank):
    drop_messages_of(monkeypatch, dead_rank)

    def work(rank):
        model, optimizer = build_and_train(rank)
        started = nl.save(tmp_path, model, optimizer)
        started.abandon(nl.errors.RankFailure("it has died", dead_rank=dead_rank), seconds=10_000)
        with pytest.raises(CheckpointError, match=f"rank {dead_rank} does not respond"):
            started.wait()

    nl.spmd.run(work, 4, timeout=100)
    assert not (tmp_path / index.NAME).exists()


def test_checkpoint_survives_a_rank_that_dies_after_writing(tmp_path):
    def work(rank):
        model, optimizer = build_and_train(rank)
        started = nl.save(tmp_path, model, optimizer)
        if rank == 1:
            started.wait()
        dist.barrier()
        started.abandon(nl.errors.RankFailure("it has died", dead_rank=1))
        started.wait()

    nl.spmd.run(work, 2)
    assert (tmp_path / index.NAME).exists()


def test_latest_file_names_the_newest_checkpoint(tmp_path):
    def work(rank):
        model, optimizer = build_and_train(rank)
        for step in range(1, 5):
            save.save_and_prune(tmp_path, 2, step, model, optimizer)

    nl.spmd.run(work, 2)
    assert (tmp_path / save.LATEST).read_text() == "step-00000004\n"
    assert save.steps(tmp_path) == [3, 4]


def test_store_keeps_only_the_keys_of_the_last_save(tmp_path):
    def work(rank):
        model, optimizer = build_and_train(rank)
        before = _torch.job_store().num_keys()
        sizes = []
        for step in range(3):
            nl.save(tmp_path / str(step), model, optimizer).wait()
            dist.barrier()
            sizes.append(_torch.job_store().num_keys() - before)
            dist.barrier()
        return sizes

    assert nl.spmd.run(work, 2)[0] == [2, 2, 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_safetensors_library_reads_written_file(tmp_path, dtype):
    bits = torch.arange(48, dtype=torch.uint8).clamp(max=1 if dtype is torch.bool else 255)
    tensors = {"some": bits.view(dtype), "empty": bits.view(dtype)[:0], "word": torch.tensor(3)}
    found = safetensors_file.write_file(tmp_path / "a.safetensors", tensors)
    assert index.hash_file(tmp_path / "a.safetensors") == found
    with safe_open(tmp_path / "a.safetensors", "pt") as values:
        assert set(values.keys()) == tensors.keys()
        for name, tensor in tensors.items():
            there = values.get_tensor(name)
            assert there.dtype == tensor.dtype and there.shape == tensor.shape
            assert tensor_bytes(there) == tensor_bytes(tensor)


def test_unsupported_dtype_raises(tmp_path):
    with pytest.raises(ValueError, match="odd is torch.complex128, which safetensors"):
        safetensors_file.write_file(tmp_path / "a", {"odd": torch.zeros(1, dtype=torch.complex128)})
    assert not list(tmp_path.iterdir())


SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6)


@settings(max_examples=25, deadline=None)
@given(shapes=SHAPES, chunk=st.integers(1, 64))
def test_written_file_round_trips_any_shapes(tmp_path_factory, shapes, chunk):
    kinds = [torch.float32, torch.bfloat16, torch.int8]
    tensors = {
        f"t{n}": torch.randn(shape).mul(9).to(kinds[n % 3]) for n, shape in enumerate(shapes)
    }
    path = tmp_path_factory.mktemp("file") / "a.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_file, "CHUNK", chunk)
        assert safetensors_file.write_file(path, tensors) == index.hash_file(path)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(found[name].equal(tensor) for name, tensor in tensors.items())


def test_staging_buffers_are_reused_for_equal_shapes():
    memory, state = StagingBuffers(), {"a": torch.ones(8), "b": torch.ones(3)[::2]}
    first = {name: copy.data_ptr() for name, copy in memory.copy(state).complete().items()}
    state["a"] += 1
    second = memory.copy(state).complete()
    assert {name: copy.data_ptr() for name, copy in second.items()} == first
    assert second["a"].equal(state["a"]) and second["b"].is_contiguous()
    grown = memory.copy({"a": torch.ones(9)}).complete()
    assert grown.keys() == {"a"} and grown["a"].equal(torch.ones(9))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch finds none here")
def test_gpu_update_waits_for_the_staging_copy():
    size = 2**26
    now, later = (torch.ones(size, device="cuda") for _ in range(2))
    copy = StagingBuffers().copy({"now": now, "later": later}, deferred={"later"})
    now += 1
    copy.wait_before_update()
    later += 1
    found = copy.complete()
    assert all(value.is_pinned() and value.eq(1).all() for value in found.values())


def test_state_dict_that_is_not_json_raises(tmp_path):
    class Scheduler:
        def state_dict(self):
            return {"when": {1, 2}}

    def work(rank):
        model, optimizer = build_and_train(rank)
        with pytest.raises(CheckpointError, match=r"scheduler.state_dict\(\) is not JSON-ser"):
            nl.save(tmp_path / "a", model, optimizer, scheduler=Scheduler())

    nl.spmd.run(work, 2)


def test_run_ends_with_the_error_of_a_failed_write(monkeypatch, small_run, tmp_path):
    """Expect the error on all ranks a few steps later; the previous checkpoint remains."""
    write = safetensors_file.write_file

    def full_at_four(path, *rest):
        if path.parent.name == "step-00000004":
            raise OSError(28, "No space left on device")
        return write(path, *rest)

    monkeypatch.setattr(safetensors_file, "write_file", full_at_four)
    small_run["checkpoint"] = {"folder": str(tmp_path / "kept"), "every": 2}
    small_run["train"] |= {"steps": 500, "eval_sequences": 0, "sample_tokens": 0}

    def work(rank):
        trainer = nl.Trainer(small_run)
        step = trainer.step
        trainer.step = lambda: (time.sleep(0.02), step())[1]
        trainer.fit()

    with pytest.raises(RankError, match="cannot write .*step-00000004.*No space left"):
        nl.spmd.run(work, 2)
    assert save.steps(tmp_path / "kept") == [2]


def test_every_minutes_saves_on_all_ranks_after_the_same_step(monkeypatch, small_run, tmp_path):
    """The first rank whose interval has elapsed triggers the save for all ranks."""
    now = iter(range(0, 10_000, 10))  # each clock reading advances by ten seconds
    monkeypatch.setattr(checkpoint_manager, "time", SimpleNamespace(monotonic=lambda: next(now)))
    small_run["checkpoint"] = {"folder": str(tmp_path / "kept"), "every_minutes": 1.0, "keep": 9}
    small_run["train"] |= {"steps": 9, "eval_sequences": 0, "sample_tokens": 0}
    nl.spmd.run(lambda rank: nl.Trainer(small_run).fit().steps, 2)
    saved = save.steps(tmp_path / "kept")
    assert len(saved) >= 3 and saved[-1] == 9 and 1 not in saved
