"""Command-line options of the collectives benchmark, and sizes such as ``64K`` or ``1K:256M:4``.

This module does not import torch, so that a wrong command line is reported at once. K, M and G are
powers of 1024, as in nccl-tests.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from ci.command_line import make_parser

MODULE = "ci.benchmarks.collectives"
SHARDING = ("all_gather", "reduce_scatter", "all_reduce")  # in all patterns; the default
OPERATIONS = (*SHARDING, "all_to_all", "gather", "scatter", "reduce", "send", "ring")
PATTERNS = ("plain", "in_place", "fsdp", "fsdp_pool", "fsdp_empty", "fsdp_read")
DTYPES = ("float32", "float64", "bfloat16", "float16", "int8", "uint8", "int32", "int64")
MODELS = ("34M", "1M")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
SIZE_SYNTAX = (
    "write bytes as 4096, 64K, 16M or 1G, and a range as FIRST:LAST:FACTOR, for instance 1K:256M:4"
)
EXAMPLES = f"""\
examples:
  python -m {MODULE}
      nearlinear and gloo: three operations, 1 KiB to 256 MiB, 2 ranks on this machine
  python -m {MODULE} --ops all_gather --patterns fsdp --sizes 1M:256M:4 \\
      --ranks 4 --json all_gather.json --plot all_gather.svg
      buffers allocated as FSDP2 allocates them; results and a figure as files
  python -m {MODULE} --backends a=gloo b=gloo --sizes 1M
      a backend against itself: the noise of ratios on this machine
  python -m {MODULE} --step --ranks 2
      a training step instead of single collectives
  torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
      -m {MODULE} --sizes 64K:64M:4
      several machines (run the same command on each)

patterns:
  plain       out of place, buffers reused
  in_place    the input is this rank's part of the output (reduce_scatter: the reverse)
  fsdp        FSDP2's calls per layer: allocate, copy the shard in, gather in place, free;
              the memory is the best that the backend offers: outputs shared by the ranks of a
              node, as nearlinear_collectives.use_in() allocates them, else the backend's pool,
              else torch.empty
  fsdp_pool   fsdp without shared outputs: FSDP2 after
              set_allocate_memory_from_process_group_for_comm(True)
  fsdp_empty  fsdp with torch.empty for all backends: FSDP2's default
  fsdp_read   fsdp, then copy the output out once, as FSDP2 does

all_to_all, gather, scatter, reduce, send and ring have the pattern plain only; rank 0 is the root.
send: rank 0 sends to rank 1, which sends what it received to rank 2, and so on. ring: every rank
sends to the next one and receives from the previous one by batch_isend_irecv.

Sizes and bandwidths are those of nccl-tests: size is the output of all_gather, all_to_all and
gather, the input of reduce_scatter and scatter, the buffer of the others; algbw is size / time;
busbw is algbw * (n-1)/n, for all_reduce algbw * 2(n-1)/n, for reduce, send and ring algbw. A time
is that of the slowest rank; the tables show the median and the minimum over blocks of calls.
#wrong counts elements with wrong values; the exit status is 1 if there are any.
"""


class UsageError(ValueError):
    """A request that cannot be carried out. The command line prints it and exits with status 2."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse and check the command line.

    Returns:
        The options, with ``sizes`` in bytes.

    Raises:
        UsageError: An option has a value that is not allowed.
        SystemExit: With status 2, if argparse rejects the command line.
    """
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
        raise UsageError("--reduce avg is defined for floating-point --dtypes only")
    for path in filter(None, (options.json, options.csv, options.plot)):
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}; create it first")
    if options.plot and options.step is not None:
        raise UsageError("--plot draws collectives, not --step; use --json to save step times")
    if options.step == []:
        options.step = list(MODELS)
    return options


def parse_size(text: str) -> int:
    """Convert a size such as ``64K`` to bytes; raise ValueError unless it is a positive size."""
    match = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not match or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size: {SIZE_SYNTAX}")
    return int(match[1]) * UNITS[match[2].upper()]


def parse_sizes(texts: list[str]) -> list[int]:
    """Expand sizes and ranges ``FIRST:LAST:FACTOR`` to distinct sizes in ascending order."""
    found: set[int] = set()
    for text in texts:
        parts = text.split(":")
        if len(parts) == 1:
            found.add(parse_size(text))
            continue
        if len(parts) > 3:
            raise ValueError(f"{text!r} is not a range of sizes: {SIZE_SYNTAX}")
        size, last = parse_size(parts[0]), parse_size(parts[1])
        factor = int(parts[2]) if len(parts) == 3 and parts[2].isdigit() else 2
        if len(parts) == 3 and not (parts[2].isdigit() and factor > 1):
            raise ValueError(f"{text!r}: the factor must be an integer above 1; {SIZE_SYNTAX}")
        if size > last:
            raise ValueError(f"{text!r}: the first size is larger than the last; {SIZE_SYNTAX}")
        while size <= last:
            found.add(size)
            size *= factor
    return sorted(found)


def format_size(size: int) -> str:
    """Format bytes with a binary unit, ``65536`` as ``64 KiB``, and at most one decimal."""
    power = min(3, (size.bit_length() - 1) // 10) if size else 0
    number = f"{size / 1024**power:.1f}".removesuffix(".0")
    return f"{number} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        MODULE, "Measure torch.distributed backends on CPU tensors side by side.", EXAMPLES
    )
    workload = parser.add_argument_group("workload").add_argument
    workload("--backends", nargs="+", default=["nearlinear", "gloo"], metavar="[LABEL=]NAME",
             help="any backends of torch.distributed (default: nearlinear gloo)")  # fmt: skip
    workload("--against", metavar="LABEL", help="baseline of the ratios (default: the last one)")
    workload("--import", nargs="+", default=[], dest="plugins", metavar="PACKAGE",
             help="packages that register backends when imported")  # fmt: skip
    workload("--ops", nargs="+", choices=OPERATIONS, default=SHARDING, metavar="OP",
             help=f"among {', '.join(OPERATIONS)} (default: {' '.join(SHARDING)})")  # fmt: skip
    workload("--sizes", nargs="+", default=["1K:256M:4"], metavar="SIZE",
             help="bytes such as 64K, or FIRST:LAST:FACTOR (default: 1K:256M:4)")  # fmt: skip
    workload("--patterns", nargs="+", choices=PATTERNS, default=["plain"], metavar="PATTERN",
             help=f"among {', '.join(PATTERNS)} (default: plain)")  # fmt: skip
    workload("--dtypes", nargs="+", choices=DTYPES, default=["float32"], metavar="DTYPE",
             help=f"among {', '.join(DTYPES)} (default: float32)")  # fmt: skip
    workload("--reduce", choices=("sum", "avg", "min", "max"), default="sum")
    workload("--step", nargs="*", choices=MODELS, metavar="MODEL",
             help="measure FSDP2 training steps instead: models with 34M and 1M parameters, or "
             "one of them")  # fmt: skip
    method = parser.add_argument_group("method").add_argument
    method("--ranks", type=int, default=2, metavar="N",
           help="processes on this machine (default: 2); ignored under torchrun")  # fmt: skip
    method("--blocks", type=int, default=8, metavar="N", help="blocks per size (default: 8)")
    method("--passes", type=int, default=1, metavar="N",
           help="repetitions of the whole benchmark, so that the blocks of one size are minutes "
           "apart and a slow period affects all sizes (default: 1)")  # fmt: skip
    method("--block-ms", type=float, default=30, metavar="MS",
           help="length of a block (default: 30, at least two calls)")  # fmt: skip
    method("--timeout", type=float, default=120, metavar="S",
           help="timeout of a collective in seconds (default: 120)")  # fmt: skip
    method("--force", action="store_true", help="run even if the memory estimate is too large")
    out = parser.add_argument_group("files").add_argument
    out("--json", type=Path, metavar="FILE", help="all results, with the command and the machine")
    out("--csv", type=Path, metavar="FILE", help="one line per size and backend")
    out("--plot", type=Path, metavar="FILE", help="bus bandwidth over size, .svg or .png")
    parser.add_argument("--spawned", nargs=2, help=argparse.SUPPRESS)
    return parser
