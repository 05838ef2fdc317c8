"""``python -m nearlinear_compat run [--ranks N] SCRIPT ARGS``: run a script with the aliases."""

from __future__ import annotations

import os
import runpy
import sys

from .finder import ALIASES, install

USAGE = """usage: python -m nearlinear_compat run [--ranks N] SCRIPT [ARGUMENTS ...]

Run a Python script written for one of these libraries on nearlinear:
{libraries}

Ranks are started as before: torchrun --nproc-per-node 8 -m nearlinear_compat run SCRIPT.
With --ranks N, nearlinear starts N ranks on this machine.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    ranks = 0
    if argv[:2] == ["run", "--ranks"] and argv[2:3] and argv[2].isdigit():
        ranks, argv = int(argv[2]), ["run", *argv[3:]]
    if len(argv) < 2 or argv[0] != "run":
        shown = argv[:1] == ["--help"]
        libraries = "\n".join(f"  {alias}" for alias in ALIASES)
        print(USAGE.format(libraries=libraries), file=sys.stdout if shown else sys.stderr)
        return 0 if shown else 2
    script = argv[1]
    if not os.path.isfile(script):
        print(f"error: there is no script {script}", file=sys.stderr)
        return 2
    if ranks:
        from nearlinear.launch.local import LocalRanks, run_ranks

        status = run_ranks(LocalRanks(ranks), "nearlinear_compat", argv)
        if status.reason:
            print(f"error: {status.reason}", file=sys.stderr)
        return status.code
    run_script(script, argv[2:])
    return 0


def run_script(script: str, arguments: list[str]) -> None:
    """Run ``script`` as ``__main__``, and leave the job in step with the other ranks."""
    install()
    _allow_cpu()
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    if "nearlinear" in sys.modules:
        import nearlinear

        nearlinear.shutdown()


def _allow_cpu() -> None:
    """Let scripts select a GPU on a machine without any, where nearlinear trains on the CPU."""
    import torch

    if not torch.cuda.is_available():

        def set_device(device: object) -> None:
            """Do nothing: there is no GPU."""

        torch.cuda.set_device = set_device


if __name__ == "__main__":
    sys.exit(main())
