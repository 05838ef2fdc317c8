"""Models with dropout, a reference of two steps, and live bytes between forward and backward."""

import functools

import torch
from torch.distributed.tensor import DTensor

from nearlinear import _torch
from tests.support import parity

DROPOUT = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "llama": {"attention_dropout": 0.1},
}
STRATEGIES = ["each", "contiguous", "group_2", "group_3", "selective", 600_000]

reference = functools.cache(parity.alone)


def deep(family: str, **changes) -> torch.nn.Module:
    """Build a model of four layers, the minimum for groups with a middle."""
    return parity.build(family, **parity.layers(family, 4) | changes)


def build(family: str, **changes) -> torch.nn.Module:
    """Build a model with dropout in training mode."""
    return deep(family, **DROPOUT[family] | changes).train()


def two_steps(model) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of two batches and their summed gradients, with reproducible dropout."""
    losses = []
    for step in range(2):
        torch.manual_seed(5 + step)
        loss = model(**parity.rows(step)).loss
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


def gradients(model) -> dict[str, torch.Tensor]:
    def whole(value):
        return value.full_tensor() if isinstance(value, DTensor) else value.clone()

    return {name: whole(p.grad) for name, p in model.named_parameters()}


@functools.cache
def plain(family: str, **changes):
    """Return the reference of plain PyTorch.

    Key-value caches change the last bits, because GPT-2 copies keys and values to them.
    """
    return two_steps(build(family, **changes))


def assert_close(found: dict, expected: dict, bound: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (found[name] - gradient).abs().max().item()
        assert difference <= bound, f"{name} differs by {difference:g}"


class Made(_torch.TorchDispatchMode):
    """Track the storages of all operator results by weak references."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        def remember(tensor):
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = _torch.WeakStorage(storage), storage.nbytes()
            return tensor

        return _torch.map_tensors(remember, function(*args, **kwargs or {}))

    @property
    def alive(self) -> int:
        """Bytes of live storages."""
        return sum(size for storage, size in self.storages.values() if not storage.expired())


def alive_after_forward(model) -> int:
    """Return the bytes that a forward pass of ``model`` keeps for its backward pass."""
    with Made() as made:
        loss = model(**parity.rows(0)).loss
    alive = made.alive
    loss.backward()
    model.zero_grad()
    return alive
