"""``torch.compile`` for each block by itself, as in torchtitan: one graph serves all blocks.

Only the ``forward`` of a block is compiled. FSDP2's hooks, which gather and free its parameters,
run outside the graph. Names, checkpoints and hooks do not change.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..distributed import runtime
from ..distributed.thread_backend import BACKEND as THREADS
from ..errors import ConfigError
from .model_state import find_blocks, model_state

log = logging.getLogger(__name__)


def compile_blocks(
    model: nn.Module,
    *,
    blocks: list[nn.Module] | None = None,
    backend: str | Callable = "inductor",
) -> nn.Module:
    """Compile each of ``model``'s blocks on its first call, in place; return the model.

    Example::

        model = nl.shard(nl.compile_blocks(model))

    Call it after `transform` and before `pipeline`, `shard`, `checkpoint_activations` and
    `offload_activations`. Collectives inside a block (ring attention) break its graph and run as
    before. ``model.config.use_cache`` is switched off: a key-value cache distinguishes layers, so
    that every block would be compiled by itself.

    Args:
        blocks: Blocks to compile, as in `shard`.
        backend: Backend of ``torch.compile``.

    Raises ConfigError if activations are checkpointed or offloaded already, and for ring attention
    among ranks that are threads, whose messages torch cannot trace.
    """
    now = runtime.current_or_none()
    if now is not None and now.mesh.context > 1 and now.config.cp_comm_type == "p2p":
        if dist.get_backend() == THREADS:
            raise ConfigError(
                "nl.compile_blocks with cp_comm_type = 'p2p' among ranks that are threads: torch "
                "cannot trace their messages; set it to 'all_gather', or start the ranks as "
                "processes"
            )
    blocks = find_blocks(model) if blocks is None else blocks
    activations = model_state(model).activations
    if activations is not None and any(block in activations.blocks for block in blocks):
        raise ConfigError(
            "nl.compile_blocks: the activations of the blocks are checkpointed or offloaded "
            "already: call nl.compile_blocks first, so that recomputation runs compiled blocks"
        )
    config = getattr(model, "config", None)
    if config is not None and getattr(config, "use_cache", False):
        config.use_cache = False
        log.info(
            "nl.compile_blocks: switched config.use_cache off, because a cache makes torch "
            "compile every layer by itself"
        )
    for block in blocks:
        block.forward = CompiledForward(block.forward, backend)
    return model


class CompiledForward:
    """The ``forward`` of a block, compiled on its first call."""

    def __init__(self, forward: Callable, backend: str | Callable):
        functools.update_wrapper(self, forward)
        self.forward, self.backend = forward, backend
        self._run = torch.compile(forward, backend=backend)
        self._recomputing: Callable | None = None

    def __call__(self, *args, **kwargs):
        return self._run(*args, **kwargs)

    def recomputing(self, context_fn: Callable) -> Callable:
        """Return the forward pass with selective recomputation as a part of its graph.

        ``context_fn`` is that of `torch.utils.checkpoint.checkpoint`, the same on every call.
        """

        def recomputed(*args, **kwargs):
            forward = self.forward
            return checkpoint(forward, *args, use_reentrant=False, context_fn=context_fn, **kwargs)

        if self._recomputing is None:
            self._recomputing = torch.compile(recomputed, backend=self.backend)
        return self._recomputing
