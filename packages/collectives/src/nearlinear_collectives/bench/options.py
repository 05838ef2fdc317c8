"""The command line's options, checked before a rank is started where that needs no torch."""

import argparse
import math
from pathlib import Path

from .errors import UsageError
from .sizes import parse_sizes

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
PATTERNS = ("plain", "in_place", "fsdp", "fsdp_pool", "fsdp_empty", "fsdp_read")
DTYPES = ("float32", "float64", "bfloat16", "float16", "int8", "uint8", "int32", "int64")
MODELS = ("34M", "1M")
EXAMPLES = """\
examples:
  python -m nearlinear_collectives.bench
      nearlinear beside gloo: three operations, 1 KiB to 256 MiB, 2 ranks of this machine
  python -m nearlinear_collectives.bench --ops all_gather --patterns fsdp --sizes 1M:256M:4 \\
      --ranks 4 --json all_gather.json --plot all_gather.svg
      memory as FSDP2 takes it; numbers and a figure as files
  python -m nearlinear_collectives.bench --backends a=gloo b=gloo --sizes 1M
      a backend against itself: how far ratios can be trusted on this machine now
  python -m nearlinear_collectives.bench --step --ranks 2
      a training step instead of single collectives
  torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
      -m nearlinear_collectives.bench --sizes 64K:64M:4
      across machines (the same command on each)

patterns:
  plain       out of place, buffers reused
  in_place    the input is the own part of the output (reduce_scatter: the other way round)
  fsdp        what FSDP2 does per layer: allocate, copy the own shard in, gather in place, free;
              memory is the best that the backend has: outputs shared by the ranks of a node, as
              nearlinear_collectives.use_in() takes them, else its pool, else torch.empty
  fsdp_pool   the same without shared outputs: FSDP2 after
              set_allocate_memory_from_process_group_for_comm(True)
  fsdp_empty  the same with torch.empty for all: FSDP2 as it is
  fsdp_read   fsdp, and then the whole output is copied out once, as FSDP2 does

Sizes and bandwidths are nccl-tests': size is all_gather's whole output, reduce_scatter's whole
input, all_reduce's buffer; algbw is size over time; busbw is algbw * (n-1)/n, for all_reduce
* 2(n-1)/n. Times are those of the slowest rank, medians and minima over blocks of calls.
#wrong counts elements with wrong values; any makes the exit status 1.
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options with ``sizes`` in bytes; SystemExit 2 or UsageError for what cannot be."""
    options = _parser().parse_args(arguments)
    try:
        options.sizes = parse_sizes(options.sizes)
    except ValueError as error:
        raise UsageError(f"--sizes: {error}") from None
    for name, least in (
        ("ranks", 2),
        ("blocks", 1),
        ("passes", 1),
        ("block_ms", 0.01),
        ("timeout", 1),
    ):
        value = getattr(options, name)
        if value < least or not math.isfinite(value):
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    if options.reduce == "avg" and any("int" in dtype for dtype in options.dtypes):
        raise UsageError("--reduce avg: averages exist for floating-point --dtypes only")
    for path in filter(None, (options.json, options.csv, options.plot)):
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}")
    if options.plot:
        from . import plot

        if options.step is not None:
            raise UsageError("--plot draws collectives, not --step; --json keeps a step's numbers")
        plot.check(options.plot)
    if options.step == []:
        options.step = list(MODELS)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nearlinear_collectives.bench",
        description="Measure torch.distributed backends on CPU tensors side by side.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is measured").add_argument
    what("--backends", nargs="+", default=["nearlinear", "gloo"], metavar="[LABEL=]NAME",
         help="any backends of torch.distributed (default: nearlinear gloo)")  # fmt: skip
    what("--against", metavar="LABEL", help="whom ratios compare with (default: the last one)")
    what("--import", nargs="+", default=[], dest="plugins", metavar="PACKAGE",
         help="packages that register backends when imported")  # fmt: skip
    what("--ops", nargs="+", choices=OPERATIONS, default=OPERATIONS, metavar="OP",
         help=f"among {', '.join(OPERATIONS)} (default: all)")  # fmt: skip
    what("--sizes", nargs="+", default=["1K:256M:4"], metavar="SIZE",
         help="bytes such as 64K, or FIRST:LAST:FACTOR (default: 1K:256M:4)")  # fmt: skip
    what("--patterns", nargs="+", choices=PATTERNS, default=["plain"], metavar="PATTERN",
         help=f"among {', '.join(PATTERNS)} (default: plain)")  # fmt: skip
    what("--dtypes", nargs="+", choices=DTYPES, default=["float32"], metavar="DTYPE",
         help=f"among {', '.join(DTYPES)} (default: float32)")  # fmt: skip
    what("--reduce", choices=("sum", "avg", "min", "max"), default="sum")
    what("--step", nargs="*", choices=MODELS, metavar="MODEL",
         help="measure FSDP2 training steps instead, of models with 34M and 1M parameters, or of "
         "one of them")  # fmt: skip
    how = parser.add_argument_group("how").add_argument
    how("--ranks", type=int, default=2, metavar="N",
        help="processes on this machine (default: 2); under torchrun, torchrun's")  # fmt: skip
    how("--blocks", type=int, default=8, metavar="N", help="blocks per size (default: 8)")
    how("--passes", type=int, default=1, metavar="N",
        help="times that all is gone through: a size's blocks then lie minutes apart, and an "
        "hour in which the machine is slow does not fall on one size (default: 1)")  # fmt: skip
    how("--block-ms", type=float, default=30, metavar="MS",
        help="length of a block (default: 30, at least two calls)")  # fmt: skip
    how("--timeout", type=float, default=120, metavar="S",
        help="seconds after which a collective has failed (default: 120)")  # fmt: skip
    how("--force", action="store_true", help="run although memory is short by the estimate")
    out = parser.add_argument_group("files").add_argument
    out("--json", type=Path, metavar="FILE", help="all numbers, with the command and the machine")
    out("--csv", type=Path, metavar="FILE", help="a line per size and backend")
    out("--plot", type=Path, metavar="FILE", help="bus bandwidth over size, .svg or .png")
    parser.add_argument("--spawned", nargs=2, help=argparse.SUPPRESS)
    return parser
