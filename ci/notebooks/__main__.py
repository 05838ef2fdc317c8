"""Command line: run the notebooks (the default), ``--check`` or ``--sync`` them.

The exit code is 0, 1 if a notebook failed or has a fault, and 2 for an invalid request.
"""

import argparse
import signal
import sys
from pathlib import Path

import yaml

from ci.notebooks import ROOT, execute, gallery, pairs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.notebooks",
        description="Run every notebooks/NN_*.ipynb and write artifacts/index.html.",
    )
    job = parser.add_mutually_exclusive_group()
    job.add_argument("--check", action="store_true", help="report faults of the notebook files")
    job.add_argument("--sync", action="store_true", help="write each .ipynb from its .py")
    parser.add_argument("--scale", default="ci", help="the parameter `scale` (default: ci)")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="01",
        help="only notebooks whose name starts with this; repeatable",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another parameter with a YAML value (12, 1.5, true, text); repeatable",
    )
    parser.add_argument("--cell-timeout", type=int, default=600, metavar="SECONDS")
    parser.add_argument("--notebooks", type=Path, default=ROOT / "notebooks", metavar="FOLDER")
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "artifacts" / "notebooks",
        metavar="FOLDER",
        help="executed copies; the gallery is one level up (default: artifacts/notebooks)",
    )
    args = parser.parse_args(argv)
    try:
        stems = pairs.select(args.notebooks, args.only)
        if args.sync:
            return sync(args.notebooks, stems)
        if args.check:
            return check(args.notebooks, stems)
        parameters = {"scale": args.scale, **dict(map(parse_setting, args.set))}
        notebooks = [args.notebooks / f"{stem}.ipynb" for stem in stems]
        execute.check_parameters(notebooks, parameters)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        return run(notebooks, parameters, args.output, args.cell_timeout)
    except KeyboardInterrupt:
        print("\nInterrupted.")
        return 130


def parse_setting(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"--set {text}: expected NAME=VALUE, for example --set steps=20.")
    return name, yaml.safe_load(value)


def sync(folder: Path, stems: list[str]) -> int:
    for stem in stems:
        print(f"{stem}.ipynb: {'written' if pairs.sync(folder, stem) else 'up to date'}")
    return 0


def check(folder: Path, stems: list[str]) -> int:
    faults = [
        f"{stem}: {fault}\n    fix: {fix}"
        for stem in stems
        for fault, fix in pairs.faults(folder, stem)
    ]
    for fault in faults:
        print(fault)
    print(f"{len(stems)} notebooks checked, {len(faults)} faults")
    return 1 if faults else 0


def run(notebooks: list[Path], parameters: dict, output: Path, cell_timeout: int) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    execute.adopt_orphans()
    output.mkdir(parents=True, exist_ok=True)
    failed = []
    for path in notebooks:
        print(f"[{path.stem}] running with {parameters}", flush=True)
        result = execute.run(path, output / path.name, parameters, cell_timeout)
        gallery.render(output / path.name)
        gallery.write_index(output)
        print(f"[{path.stem}] {result.status} in {result.seconds:.0f} s", flush=True)
        if result.error:
            failed.append(path.stem)
            print(result.error, flush=True)
    names = f" ({', '.join(failed)})" if failed else ""
    print(f"notebooks: {len(notebooks) - len(failed)} passed, {len(failed)} failed{names}")
    print(f"gallery: {output.parent / 'index.html'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
