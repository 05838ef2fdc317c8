"""Find the repeated blocks of a transformer: the units that are gathered and freed one at a time.

Hugging Face models name theirs in ``_no_split_modules``. For any other model the blocks are the
children of the ``nn.ModuleList`` (or Sequential) that holds the most parameters in equal modules.
"""

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..errors import ConfigError


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of ``model`` in forward order. Raises ConfigError when none can be told."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    named = [module for module in model.modules() if _own_name(module) in names]
    outermost = _without_nested(named)
    if outermost and outermost != [model]:
        return outermost
    stacks = [list(m.children()) for m in model.modules() if _is_stack(m)]
    if not stacks:
        raise ConfigError(
            f"{type(model).__name__} has no list of equal blocks to shard by: pass them, as in "
            "nl.shard(model, blocks=list(model.layers))"
        )
    return max(stacks, key=lambda blocks: sum(p.numel() for b in blocks for p in b.parameters()))


def _own_name(module: nn.Module) -> str:
    """The name of its class; FSDP2 puts something before it."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name


def _is_stack(module: nn.Module) -> bool:
    children = list(module.children())
    return (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and len(children) > isinstance(module, nn.Sequential)
        and len({type(child) for child in children}) == 1
        and any(True for _ in children[0].parameters())
    )


def _without_nested(modules: list[nn.Module]) -> list[nn.Module]:
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return [module for module in modules if id(module) not in inner]
