"""``torch.compile`` for each block by itself, as torchtitan does: one graph serves all of them.

What is compiled is a block's ``forward``; what FSDP2 does around it, gathering and freeing, stays
outside. Names, checkpoints and hooks are as without.
"""

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from .. import runtime
from ..errors import ConfigError
from ..spmd.threads import BACKEND as THREADS
from .blocks import find_blocks

log = logging.getLogger(__name__)


def compile_blocks(
    model: nn.Module,
    *,
    blocks: list[nn.Module] | None = None,
    backend: str | Callable = "inductor",
) -> nn.Module:
    """Have each of ``model``'s blocks compiled when it first runs, in place; returns the model.

    After `transform` and before `pipeline` and `shard`. ``blocks``: as `shard` takes them;
    ``backend``: torch's. Collectives inside a block (a ring of context ranks) split its graph and
    run as before. ``model.config.use_cache`` is switched off: a cache of keys and values knows
    layers apart, so that every block would be compiled by itself. Raises ConfigError for a ring
    among ranks that are threads, whose messages torch cannot trace.
    """
    now = runtime.current()
    ring = now.mesh.context > 1 and now.config.cp_comm_type == "p2p"
    if ring and dist.get_backend() == THREADS:
        raise ConfigError(
            "compiled blocks with cp_comm_type = 'p2p' among ranks that are threads: torch cannot "
            "trace their messages; set it to 'all_gather', or start the ranks as processes"
        )
    if getattr(getattr(model, "config", None), "use_cache", False):
        model.config.use_cache = False
        log.info("compiled blocks: config.use_cache is off, its cache would be compiled per layer")
    for block in find_blocks(model) if blocks is None else blocks:
        block.forward = torch.compile(block.forward, backend=backend)
    return model
