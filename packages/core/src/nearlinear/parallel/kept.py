"""How many blocks of a sharded model stay gathered: `schedule` keeps them, the planner counts them.

No torch here.
"""


def kept_blocks(sizes: list[int], depth: int, live: int) -> int:
    """How many of the first blocks may stay gathered throughout, beside what must be.

    ``sizes``: parameters of the root, then of the blocks; ``live``: so many may be gathered at
    once; ``depth``: blocks that are gathered ahead.
    """
    root, *blocks = sizes
    if sum(sizes) <= live:
        return len(blocks)
    room, kept = live - root - (1 + depth) * max(blocks), 0
    while kept < len(blocks) and sum(blocks[: kept + 1]) <= room:
        kept += 1
    return kept


def stays_gathered(parameters: int, live: int, apart: bool) -> bool:
    """Whether a pipeline's rank keeps its ``parameters`` gathered from forward to backward passes.

    Where more than ``live`` are, it does not; but it must where a schedule finds gradients of
    weights ``apart``: they are looked for in the parameters as they are before a backward pass.
    """
    return apart or parameters <= live
