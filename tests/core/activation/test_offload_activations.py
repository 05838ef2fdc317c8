"""Activation offload: bit-identical gradients, placement over time, and failures."""

import gc
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear import _torch
from nearlinear.activation import host_buffer
from nearlinear.activation.host_buffer import ALIGNMENT, HostBufferPool
from nearlinear.fsdp.model_state import model_state
from tests.support import activations, parity

LAYERS = 7


def assert_nothing_is_left(model):
    """After a step that failed: no host memory is taken, and the next steps are right."""
    model.zero_grad()
    gc.collect()
    assert pool_of(model).used == 0
    (_, found), (_, expected) = map(
        activations.two_steps, (model, activations.build("llama", num_hidden_layers=LAYERS))
    )
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient)


def alone(body):
    """Return ``body()`` run on one rank."""

    def on_rank(rank):
        nl.init({})
        return body()

    return nl.spmd.run(on_rank, 1)[0]


def offloaded(horizon=1, strategy="each", family="llama", **changes):
    model = activations.build(family, **changes)
    if strategy is not None:
        nl.checkpoint_activations(model, strategy)
    return nl.offload_activations(model, horizon, smallest=1)


def pool_of(model) -> HostBufferPool:
    return model_state(model).activations.offload.pool


@pytest.mark.parametrize("family", activations.DROPOUT)
@pytest.mark.parametrize("strategy", [None, *activations.STRATEGIES])
def test_gradients_do_not_change_by_a_bit(family, strategy):
    def body():
        losses, expected = activations.plain(family, use_cache=False)
        for horizon in (1, 2, 4):
            found = activations.two_steps(offloaded(horizon, strategy, family))
            assert found[0] == losses
            for name, gradient in expected.items():
                assert torch.equal(found[1][name], gradient), name

    alone(body)


class Watch:
    """Counts, by weak references, which blocks' inputs are on the device while blocks run."""

    def __init__(self, model, monkeypatch):
        self.known = []  # per input: its storage before offload and after the prefetch
        self.most = {"forward": 0, "backward": 0}
        self.copies = 0
        back = host_buffer.ThreadCopier.prefetch

        def seen(copier, source, after):
            target, copy = back(copier, source, after)
            self._know(target)
            self.copies += 1
            return target, copy

        monkeypatch.setattr(host_buffer.ThreadCopier, "prefetch", seen)
        for block in model.model.layers[1:]:  # the model itself holds the input of the first block
            block.register_forward_pre_hook(self._enters)
        for block in model.model.layers:
            block.mlp.register_forward_pre_hook(self._recomputes)

    def _know(self, tensor):
        self.known.append(_torch.WeakStorage(tensor.untyped_storage()))

    def _count(self, when):
        alive = {storage.cdata for storage in self.known if not storage.expired()}
        self.most[when] = max(self.most[when], len(alive))

    def _enters(self, block, args):
        self._know(args[0])
        self._count("forward")

    def _recomputes(self, module, args):
        if _torch.in_backward():
            self._count("backward")


@pytest.mark.parametrize("horizon", [1, 2, 4])
def test_at_most_horizon_plus_one_blocks_are_on_the_device(horizon, monkeypatch):
    copy = host_buffer.copy_bytes

    def slow(target, source):
        time.sleep(0.003)  # longer than a block takes
        copy(target, source)

    monkeypatch.setattr(host_buffer, "copy_bytes", slow)

    def body():
        model = nl.checkpoint_activations(activations.build("llama", num_hidden_layers=LAYERS))
        nl.offload_activations(model, horizon, smallest=8192)  # hidden states, and nothing else
        watch = Watch(model, monkeypatch)
        for step in range(2):
            model(**parity.rows(step)).loss.backward()
        # when a block is called, the one before it has only just begun to leave
        assert watch.most["forward"] == horizon + 2
        assert watch.most["backward"] == horizon + 1
        assert watch.copies == 2 * (LAYERS - 1 - horizon)
        peak = nl.activation_offload_stats(model)
        assert peak.blocks == horizon + 1
        assert peak.nbytes == (horizon + 1) * parity.ROWS * parity.SEQUENCE * 32 * 4
        assert nl.activation_offload_stats(model, reset=True) == peak
        assert nl.activation_offload_stats(model).blocks == 0

    alone(body)


def test_backward_prefetches_the_next_blocks(monkeypatch):
    """Block i's copies back are asked for when block i + horizon begins, in order."""
    order = []

    def body():
        model = nl.checkpoint_activations(activations.build("llama", num_hidden_layers=LAYERS))
        nl.offload_activations(model, 2, smallest=8192)
        back = host_buffer.ThreadCopier.prefetch

        def seen(copier, source, after):
            order.append("back")
            return back(copier, source, after)

        monkeypatch.setattr(host_buffer.ThreadCopier, "prefetch", seen)
        for number, block in enumerate(model.model.layers):
            block.register_full_backward_hook(lambda *_, number=number: order.append(number))
        model(**parity.rows(0)).loss.backward()

    alone(body)
    # the last three have stayed; each block that begins has the one two before it come back
    assert order == [6, "back", 5, "back", 4, "back", 3, "back", 2, 1, 0]


@pytest.mark.parametrize("seed", range(4))
def test_delayed_copies_do_not_change_gradients(seed, monkeypatch):
    copy = host_buffer.copy_bytes
    delay = random.Random(seed)

    def late(target, source):
        if delay.random() < 0.3:
            time.sleep(delay.random() * 0.004)
        copy(target, source)

    monkeypatch.setattr(host_buffer, "copy_bytes", late)

    def body():
        for strategy in (None, "each"):
            model = offloaded(1 + seed % 2, strategy, num_hidden_layers=LAYERS)
            plain = activations.build("llama", num_hidden_layers=LAYERS, use_cache=False)
            (_, found), (_, expected) = map(activations.two_steps, (model, plain))
            for name, gradient in expected.items():
                assert torch.equal(found[name], gradient), name

    alone(body)


def padded() -> dict:
    mask = torch.ones(parity.ROWS, parity.SEQUENCE, dtype=torch.int64)
    mask[0, :5] = 0
    return parity.rows(0) | {"attention_mask": mask}


class Copied:
    """Record of offloaded tensors, kept so that no memory is reused."""

    def __init__(self, monkeypatch):
        self.sources = []
        out = host_buffer.ThreadCopier.offload

        def seen(copier, source, target):
            self.sources.append(source)
            return out(copier, source, target)

        monkeypatch.setattr(host_buffer.ThreadCopier, "offload", seen)

    @property
    def storages(self) -> list[int]:
        return [source.untyped_storage()._cdata for source in self.sources]


@pytest.mark.parametrize("strategy", [None, "each"])
def test_shared_storage_is_offloaded_once(strategy, monkeypatch):
    """Masks and rotary tables of all blocks, queries and keys that lie in one storage."""
    copied = Copied(monkeypatch)

    def body():
        model = offloaded(1, strategy, num_hidden_layers=LAYERS)
        model(**padded()).loss.backward()

    alone(body)
    assert len(copied.storages) == len(set(copied.storages)) > LAYERS - 2
    mask = parity.ROWS * parity.SEQUENCE**2  # a byte, or a float, each
    masks = sum(source.numel() in (mask, 4 * mask) for source in copied.sources)
    assert masks == 1 if strategy == "each" else masks <= 1


def test_gathered_parameters_and_buffers_stay(monkeypatch):
    copied = Copied(monkeypatch)

    def on_rank(rank):
        nl.init({"hybrid_shard_degree": 2, "sdp_max_live_parameters": 0})
        with nl.spmd.one_at_a_time(seed=0):
            model = activations.deep("llama")
        nl.offload_activations(nl.shard(model), smallest=1)
        held = set()
        for block in model.model.layers:
            block.register_forward_pre_hook(
                lambda block, args: held.update(
                    p.untyped_storage()._cdata for p in block.parameters()
                )
            )
        for batch in nl.accumulate(model, [parity.rows(0)]):
            model(**batch).loss.backward()
        return held

    for held in nl.spmd.run(on_rank, 2):
        assert held and not held & set(copied.storages)


def test_small_tensors_stay():
    def body():
        model = nl.offload_activations(activations.build("llama"), smallest=2**30)
        model(**parity.rows(0)).loss.backward()
        return nl.activation_offload_stats(model)

    peak = alone(body)
    assert peak.blocks == peak.nbytes == peak.host_nbytes == 0


def test_host_memory_is_used_again():
    def body():
        model = offloaded(num_hidden_layers=LAYERS)
        sizes = []
        for step in range(3):
            loss = model(**parity.rows(step)).loss
            assert pool_of(model).used > 0
            loss.backward()
            sizes.append(nl.activation_offload_stats(model).host_nbytes)
            assert pool_of(model).used == 0
        assert len(set(sizes)) == 1 and sizes[0] > 0

    alone(body)


class Broken(Exception):
    pass


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_error_in_the_middle_of_a_step_leaves_nothing_behind(when):
    def fail(*_):
        raise Broken

    def body():
        model = offloaded(num_hidden_layers=LAYERS)
        block = model.model.layers[4 if when == "forward" else 2]
        hook = (
            block.mlp.register_forward_pre_hook(fail)
            if when == "forward"
            else block.register_full_backward_hook(fail)
        )
        with pytest.raises(Broken):
            model(**parity.rows(0)).loss.backward()
        hook.remove()
        assert_nothing_is_left(model)

    alone(body)


@pytest.mark.parametrize("copy", [1, 3, 9])
def test_failed_copy_raises_at_the_wait(copy, monkeypatch):
    """Copies out, and copies back (from the seventh on)."""
    done, works = [], host_buffer.copy_bytes

    def fails(target, source):
        done.append(1)
        if len(done) == copy:
            raise OSError("host memory is gone")
        works(target, source)

    monkeypatch.setattr(host_buffer, "copy_bytes", fails)

    def body():
        model = nl.checkpoint_activations(activations.build("llama", num_hidden_layers=LAYERS))
        nl.offload_activations(model, 1, smallest=8192)
        with pytest.raises(OSError, match="host memory is gone"):
            model(**parity.rows(0)).loss.backward()
        assert_nothing_is_left(model)

    alone(body)


class ChangesInPlace(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(64, 64)

    def forward(self, x):
        y = self.inner(x)
        z = y.square()
        y.add_(1)
        return z


@pytest.mark.parametrize("smallest", [1, 2**30])
def test_tensors_that_are_changed_in_place_are_an_error(smallest):
    def body():
        model = torch.nn.Sequential(*(ChangesInPlace() for _ in range(4)))
        nl.offload_activations(model, smallest=smallest)
        with pytest.raises(nl.errors.NearlinearError, match="changed in place"):
            model(torch.ones(8, 64)).sum().backward()

    alone(body)


def test_a_graph_may_be_used_twice():
    def body():
        model = offloaded(num_hidden_layers=LAYERS)
        plain = activations.build("llama", num_hidden_layers=LAYERS)
        for each in (model, plain):
            torch.manual_seed(0)
            loss = each(**parity.rows(0)).loss
            loss.backward(retain_graph=True)
            loss.backward()
        assert nl.activation_offload_stats(model).blocks <= 2 + 2  # the last blocks stay
        activations.assert_close(activations.gradients(model), activations.gradients(plain), 0.0)

    alone(body)


def test_several_micro_batches_of_a_pipeline_are_out_at_once():
    def on_rank(rank):
        nl.init({"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "simple"})
        with nl.spmd.one_at_a_time(seed=0):
            model = activations.deep("llama", num_hidden_layers=8)
        pipe = nl.checkpoint_activations(nl.shard(nl.pipeline(model)))
        nl.offload_activations(pipe, 1, smallest=2048)
        for batch in nl.accumulate(pipe, [parity.rows(0)]):
            pipe.step(batch)
        return nl.activation_offload_stats(pipe), pool_of(pipe).used

    for peak, used in nl.spmd.run(on_rank, 2):
        assert peak.blocks == 2 and used == 0
        assert peak.nbytes <= 3 * 2 * parity.SEQUENCE * 32 * 4  # out of 16


def test_pytorchs_own_where_the_config_says_so():
    def on_rank(rank):
        nl.init({"sm_activation_offloading": False})
        model = nl.offload_activations(nl.checkpoint_activations(activations.build("llama")))
        found = activations.two_steps(model)
        with pytest.raises(nl.errors.ConfigError, match="nothing is counted"):
            nl.activation_offload_stats(model)
        return found

    ((losses, gradients),) = nl.spmd.run(on_rank, 1)
    assert losses == activations.plain("llama", use_cache=False)[0]
    activations.assert_close(gradients, activations.plain("llama", use_cache=False)[1], 0.0)


def test_the_horizon_is_the_configs():
    def on_rank(rank):
        nl.init({"activation_loading_horizon": 3})
        model = nl.offload_activations(activations.deep("llama"))
        with pytest.raises(nl.errors.ConfigError, match="already"):
            nl.offload_activations(model)
        with pytest.raises(nl.errors.ConfigError, match="at least 1"):
            nl.offload_activations(activations.deep("llama"), 0)
        return model_state(model).activations.offload.horizon

    assert nl.spmd.run(on_rank, 1) == [3]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 5000), st.floats(0, 1)), max_size=60))
def test_host_buffer_pool_never_overlaps_allocations(actions):
    """Numbers take so many bytes, shares give back one of those that are out."""
    pool, out = HostBufferPool(chunk=8 * ALIGNMENT), []
    for action in actions:
        if isinstance(action, int):
            part, memory = pool.allocate(action)
            memory.fill_(len(out) % 251)
            assert memory.numel() == action
            out.append((part, memory, len(out) % 251))
        elif out:
            part, memory, value = out.pop(int(action * (len(out) - 1)))
            assert (memory == value).all()
            pool.release(part)
        assert all((memory == value).all() for _, memory, value in out)
        assert pool.used == sum(-(-m.numel() // ALIGNMENT) * ALIGNMENT for _, m, _ in out)
    for part, _, _ in out:
        pool.release(part)
    before = pool.nbytes
    assert pool.used == 0
    for chunk in range(before // pool.chunk):  # free ranges were merged
        pool.allocate(pool.chunk)
        assert chunk >= 0 and pool.nbytes == before or pool.chunk * (chunk + 1) > before
