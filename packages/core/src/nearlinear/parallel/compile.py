"""``torch.compile`` for each block by itself, as torchtitan does: one graph serves all of them.

What is compiled is a block's ``forward``; what FSDP2 does around it, gathering and freeing, stays
outside. Names, checkpoints and hooks are as without.
"""

import functools
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from .. import runtime
from ..errors import ConfigError
from ..spmd.threads import BACKEND as THREADS
from .activations import selective
from .blocks import find_blocks

log = logging.getLogger(__name__)


def compile_blocks(
    model: nn.Module,
    *,
    blocks: list[nn.Module] | None = None,
    backend: str | Callable = "inductor",
) -> nn.Module:
    """Have each of ``model``'s blocks compiled when it first runs, in place; returns the model.

    After `transform` and before `pipeline`, `shard`, `checkpoint_activations` and
    `offload_activations`. ``blocks``: as `shard` takes them; ``backend``: torch's. Collectives
    inside a block (a ring of context ranks) split its graph and run as before.
    ``model.config.use_cache`` is switched off: a cache of keys and values knows layers apart, so
    that every block would be compiled by itself. Raises ConfigError where activations are
    checkpointed or offloaded already, and for a ring among ranks that are threads, whose messages
    torch cannot trace.
    """
    now = runtime.current()
    ring = now.mesh.context > 1 and now.config.cp_comm_type == "p2p"
    if ring and dist.get_backend() == THREADS:
        raise ConfigError(
            "compiled blocks with cp_comm_type = 'p2p' among ranks that are threads: torch cannot "
            "trace their messages; set it to 'all_gather', or start the ranks as processes"
        )
    blocks = find_blocks(model) if blocks is None else blocks
    if any(hasattr(block, "_nearlinear_place") for block in blocks):
        raise ConfigError(
            "the blocks' activations are checkpointed or offloaded already: call nl.compile_blocks "
            "before, so that what runs again is what is compiled"
        )
    if getattr(getattr(model, "config", None), "use_cache", False):
        model.config.use_cache = False
        log.info("compiled blocks: config.use_cache is off, its cache would be compiled per layer")
    for block in blocks:
        block.forward = Compiled(block.forward, backend)
    return model


class Compiled:
    """A block's forward, compiled when it is first called."""

    def __init__(self, forward: Callable, backend: str | Callable):
        functools.update_wrapper(self, forward)
        self.backend = backend
        self.run = torch.compile(forward, backend=backend)

    def __call__(self, *args, **kwargs):
        return self.run(*args, **kwargs)

    @functools.cached_property
    def selective(self) -> Callable:
        """The same, with what is computed again in the backward pass a part of its graph."""

        def recomputed(*args, **kwargs):
            forward, contexts = self.__wrapped__, selective.contexts_of_graphs
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

        return torch.compile(recomputed, backend=self.backend)
