"""Command line of `ci.smp_scripts`."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ci.environment import ROOT
from ci.smp_scripts.expectations import EXPECTATIONS, Expectation
from ci.smp_scripts.tables import write

LOSS = re.compile(r"\bLoss: (-?\d+\.\d+(?:e-?\d+)?)")
SOURCES = ("packages/core/src", "packages/core/compat/src", "packages/collectives/src", ".")


def main(argv: list[str] | None = None, expectations: Sequence[Expectation] = EXPECTATIONS) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.smp_scripts",
        description="Run public scripts for SMP v1 from a folder, unmodified, and compare them "
        "with a table of expectations. Nothing is fetched.",
    )
    parser.add_argument("--scripts", type=Path, help="folder that contains the scripts")
    parser.add_argument("--data", type=Path, help="folder of files that the scripts read")
    parser.add_argument("--only", action="append", help="name of a run; may be repeated")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per run")
    parser.add_argument("--list", action="store_true", help="print the table of expectations")
    parser.add_argument(
        "--write-tables", action="store_true", help="update the tables of the migration guide"
    )
    args = parser.parse_args(argv)
    if args.write_tables:
        print(f"wrote {write()}")
        return 0
    chosen = [each for each in expectations if not args.only or each.name in args.only]
    if args.list:
        for each in chosen:
            print(f"{each.name}: {each.ranks} ranks, {each.script} {each.arguments}")
        return 0
    if args.scripts is None or args.data is None:
        parser.error("--scripts and --data are required")
    with tempfile.TemporaryDirectory(prefix="smp-scripts-") as scratch:
        results = run_all(chosen, args.scripts, args.data, Path(scratch), args.timeout)
    return int(any(fault for fault in results.values()))


def run_all(
    expectations: Sequence[Expectation],
    scripts: Path,
    data: Path,
    scratch: Path,
    timeout: float,
    launch: Sequence[str] | None = None,
) -> dict[str, str]:
    """Run scripts and print one line per run.

    Args:
        expectations: Runs, in this order.
        scripts: Folder that contains the scripts.
        data: Folder of files that they read.
        scratch: Empty folder.
        timeout: Seconds per run.
        launch: Command before the script; default: torchrun with nearlinear_compat.

    Returns:
        The fault of each run by its name; empty if there is none.
    """
    losses: dict[str, list[float]] = {}
    faults: dict[str, str] = {}
    for each in expectations:
        found = sorted(scripts.rglob(each.script))
        begin = time.monotonic()
        if not found:
            fault = f"there is no {each.script} in {scripts}"
        else:
            folder = scratch / (each.after or each.name).replace(" ", "-")
            code, output = _run(each, found[0], data, folder, timeout, launch)
            losses[each.name] = [float(text) for text in LOSS.findall(output)]
            fault = _fault(each, code, output, losses)
        faults[each.name] = fault
        known = losses.get(each.name, [])
        shown = " .. ".join(f"{loss:.6f}" for loss in (*known[:1], *known[1:][-1:]))
        seconds = time.monotonic() - begin
        print(f"{'FAILED' if fault else 'ok':<7} {each.name}: {each.ranks} ranks, {seconds:.0f} s, "
              f"losses {shown or '-'}{': ' * bool(fault)}{fault}", flush=True)  # fmt: skip
    return faults


def _run(
    each: Expectation,
    script: Path,
    data: Path,
    folder: Path,
    timeout: float,
    launch: Sequence[str] | None,
) -> tuple[int, str]:
    """Run a script; return the exit status and its output."""
    folder.mkdir(parents=True, exist_ok=True)
    if launch is None:
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node",
                  str(each.ranks), "-m", "nearlinear_compat", "run"]  # fmt: skip
    folders = {"--checkpoint-dir": folder, "--model-dir": folder / "model"}
    command = [*launch, str(script), *each.arguments.split()]
    command += [text for name, path in folders.items() for text in (name, str(path))]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / source) for source in SOURCES),
        "SM_HP_MP_PARAMETERS": each.parameters,
        "SM_CHANNEL_TRAIN": str(data),
        "SM_CHANNEL_TEST": str(data),
        "SM_OUTPUT_DATA_DIR": str(folder / "output"),
        "SM_MODEL_DIR": str(folder / "model"),
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            command, env=env, cwd=script.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=timeout,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return -1, f"{error.stdout or ''}\nno end after {timeout:.0f} s"
    return done.returncode, done.stdout


def _fault(each: Expectation, code: int, output: str, losses: dict[str, list[float]]) -> str:
    """Return the first difference from the expectation, or ""."""
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "no output")
    if code:
        return f"exit status {code}: {last}"
    if each.says not in output:
        return f"the output lacks {each.says!r}: {last}"
    if not each.losses_of:
        return ""
    here, there = losses[each.name], losses.get(each.losses_of, [])
    if not here or len(here) != len(there):
        return f"{len(here)} losses, and {each.losses_of!r} has {len(there)}"
    worst = max(abs(a - b) for a, b in zip(here, there, strict=True))
    if not worst <= each.tolerance:
        return f"losses differ by {worst:.1e} from those of {each.losses_of!r}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
