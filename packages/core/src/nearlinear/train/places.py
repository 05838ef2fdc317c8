"""Which block a rank is at, for those who want to know where it hangs."""

from collections.abc import Callable, Iterable

from torch import nn

from .ranks import hidden_states


def follow_blocks(model: nn.Module, blocks: Iterable[nn.Module], reach: Callable[[str], None]):
    """Have ``reach("forward of h.3")`` called before a block's parameters are gathered.

    And so before its backward pass. The hooks come before FSDP2's, which do the gathering.
    """
    names = {module: name for name, module in model.named_modules()}
    for block in blocks:
        _follow(block, names.get(block, "a block"), reach)


def _follow(block: nn.Module, name: str, reach: Callable[[str], None]) -> None:
    forward, backward = f"forward of {name}", f"backward of {name}"

    def before(module, args):
        reach(forward)

    def after(module, args, output):
        left = hidden_states(output)
        if left is not None:
            left.register_hook(lambda gradient: reach(backward))

    block.register_forward_pre_hook(before, prepend=True)
    block.register_forward_hook(after, prepend=True)
