"""A fixed, short program with every operation, dtype and reduction of the engine."""

from tests.collectives.programs import DTYPES, KINDS, Program, Step, reductions

LAYOUTS = ("contiguous", "offset", "strided", "transposed")


def every_operation(ranks: int) -> Program:
    """Alternate synchronous and asynchronous calls, layouts, sizes and pooled memory."""
    steps = []
    for kind in KINDS:
        for dtype in DTYPES:
            for op in reductions(dtype) if "reduce" in kind else ["SUM"]:
                number = len(steps)
                step = Step(
                    kind,
                    dtype=dtype,
                    reduce=op,
                    sizes=(3 * (1 + 41 * (number % 3)),),
                    root=number,
                    in_place=number % 5 == 0,
                    layout=LAYOUTS[number % 4],
                    pooled=number % 2 == 0,
                    overlap=number % 3,
                )
                steps.append(step)
    return Program((tuple(range(ranks)),), tuple(steps), seed=ranks)
