"""Models with dropout, two steps of one, and what is alive between its passes."""

import functools

import torch
from torch.distributed.tensor import DTensor

from nearlinear import _torch

from . import parity

DROPOUT = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "llama": {"attention_dropout": 0.1},
}
STRATEGIES = ["each", "contiguous", "group_2", "group_3", "selective", 600_000]

reference = functools.cache(parity.alone)


def deep(family: str, **changes) -> torch.nn.Module:
    """Of four layers: two have no middle, and are one group."""
    return parity.build(family, **parity.layers(family, 4) | changes)


def build(family: str, **changes) -> torch.nn.Module:
    """With dropout."""
    return deep(family, **DROPOUT[family] | changes).train()


def two_steps(model) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of two batches, and their summed gradients; the dropout is the same every time."""
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
    """Without anything of nearlinear's. Caches of keys and values change last bits: GPT-2's are
    copied to them."""
    return two_steps(build(family, **changes))


def assert_close(found: dict, expected: dict, bound: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (found[name] - gradient).abs().max().item()
        assert difference <= bound, f"{name} differs by {difference:g}"


class Made(_torch.TorchDispatchMode):
    """Remembers every storage that an operator returns a tensor of, without keeping it alive."""

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
        """Bytes."""
        return sum(size for storage, size in self.storages.values() if not storage.expired())


def alive_after_forward(model) -> int:
    """Bytes that a batch leaves behind in a forward pass of ``model`` for its backward pass."""
    with Made() as made:
        loss = model(**parity.rows(0)).loss
    alive = made.alive
    loss.backward()
    model.zero_grad()
    return alive
