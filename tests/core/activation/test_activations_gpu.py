"""Offloaded activations on a GPU: two streams, pinned memory, the same gradients bit for bit."""

import pytest
import torch

import nearlinear as nl
from nearlinear.activation import host_buffer
from tests.support import activations, parity

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def job():
    nl.init({})


def on_gpu(strategy=None, horizon=None, family="llama"):
    model = activations.build(family, use_cache=False, num_hidden_layers=7).cuda()
    if strategy is not None:
        nl.checkpoint_activations(model, strategy)
    if horizon:
        nl.offload_activations(model, horizon, smallest=1)
    return model


def one_step(model) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    batch = {key: value.cuda() for key, value in parity.rows(0).items()}
    model(**batch).loss.backward()
    return activations.gradients(model)


@pytest.mark.parametrize("strategy", [None, "each", "group_2", "selective"])
@pytest.mark.parametrize("horizon", [1, 2, 4])
def test_gradients_are_the_same(strategy, horizon):
    torch.use_deterministic_algorithms(True, warn_only=True)
    expected = one_step(on_gpu(strategy))
    model = on_gpu(strategy, horizon)
    activations.assert_close(one_step(model), expected, 0.0)
    assert nl.activation_offload_stats(model).blocks <= horizon + 1


def slow(milliseconds: int) -> None:
    torch.cuda._sleep(milliseconds * 10**6)


def test_copies_that_come_late_are_waited_for(monkeypatch):
    """Each copying stream sleeps before it copies."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    expected = one_step(on_gpu("each"))
    for name in ("offload", "prefetch"):
        original = getattr(host_buffer.StreamCopier, name)

        def late(copier, *arguments, original=original):
            for stream in (copier._out, copier._back):
                with torch.cuda.stream(stream):
                    slow(2)
            return original(copier, *arguments)

        monkeypatch.setattr(host_buffer.StreamCopier, name, late)
    activations.assert_close(one_step(on_gpu("each", 1)), expected, 0.0)


def test_memory_between_the_passes_is_less():
    def peak(horizon):
        model = nl.checkpoint_activations(wide())
        if horizon:
            nl.offload_activations(model, horizon)
        batch = {key: value.cuda() for key, value in parity.rows(0, 32, 512).items()}
        model(**batch).loss.backward()  # gradients, and pinned memory
        torch.cuda.synchronize()
        model.zero_grad(set_to_none=False)
        torch.cuda.reset_peak_memory_stats()
        model(**batch).loss.backward()
        return torch.cuda.max_memory_allocated()

    def wide():
        return parity.build(
            "llama", num_hidden_layers=16, max_position_embeddings=512, hidden_size=256
        ).cuda()

    hidden = 32 * 512 * 256 * 4
    assert peak(None) - peak(1) > 10 * hidden
