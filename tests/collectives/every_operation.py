"""One program with every operation, once per dtype and reduction of ours; nothing drawn, quick."""

from tests.collectives.programs import DTYPES, FALLBACKS, NATIVE, Program, Step, reductions

LAYOUTS = ("contiguous", "offset", "strided", "transposed")


def every_operation(ranks: int) -> Program:
    """In turn synchronous and not, in place, of several layouts and sizes, on the pool."""
    steps = []
    for kind in (*NATIVE, *FALLBACKS):
        native = kind in NATIVE  # which dtypes the others take depends on gloo's release
        for dtype in DTYPES if native else ["float32"]:
            for op in reductions(dtype) if native and "reduce" in kind else ["SUM"]:
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
