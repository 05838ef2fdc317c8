"""What runs inside a backward pass, and what is kept for one."""

import contextlib

import torch


def after_backward(function) -> None:
    """Call ``function`` at the end of the backward pass that is running on this thread. 2.13.0."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def in_backward() -> bool:
    """Whether a backward pass is running on this thread. 2.8.0, 2.13.0."""
    return torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def seeing_saved_tensors(see):
    """Show every tensor that is saved for a backward pass to ``see``, too.

    Hooks that are there already do with it what they do. 2.13.0.
    """
    there = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack, unpack = there or (lambda tensor: tensor, lambda tensor: tensor)

    def pack_and_see(tensor):
        see(tensor)
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack_and_see, unpack):
        yield
