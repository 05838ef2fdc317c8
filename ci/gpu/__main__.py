"""Command line of the GPU checklist."""

from __future__ import annotations

import sys
from pathlib import Path

from ci.command_line import make_parser

from . import carry, report, runner

EXAMPLES = """\
examples:
  python -m ci.gpu --list                       the stages, their time limits and purposes
  python -m ci.gpu --rehearse                   every stage on the CPU, with tiny shapes
  python -m ci.gpu --carry .wheels              download peers to carry; needs a package registry
  python -m ci.gpu --carried .wheels            every stage that has not passed yet
  python -m ci.gpu --stages memory,speed --again
  python -m ci.gpu --render                     write packages/core/docs/gpu_evidence.md

Stages run in this order, each in its own process. Results are files in ci/gpu/results. A stage that
has passed with the same sources is skipped. Exit code 1: a stage failed.
"""
REHEARSALS = runner.ROOT / "artifacts" / "gpu-rehearsal"


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(
        "ci.gpu", "Run every check that one GPU allows, from a bare checkout, offline.", EXAMPLES
    )
    parser.add_argument("--list", action="store_true", help="list the stages and exit")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU with tiny shapes")
    parser.add_argument("--stages", default="", metavar="A,B", help="run these (default: all)")
    parser.add_argument("--again", action="store_true", help="repeat stages that have passed")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER",
        help="folder of the results (default: ci/gpu/results; rehearsals: artifacts)",
    )  # fmt: skip
    parser.add_argument("--carry", type=Path, metavar="FOLDER", help="download wheels and exit")
    parser.add_argument(
        "--carried", type=Path, metavar="FOLDER", help="use the wheels of an earlier --carry"
    )
    parser.add_argument(
        "--commit", default="", help="commit of a checkout without git (default: of the manifest)"
    )
    parser.add_argument("--render", action="store_true", help="write the page of results and exit")
    options = parser.parse_args(argv)
    try:
        stages = runner.find_stages(options.stages)
        if options.list:
            print(report.format_stages(stages))
            return 0
        if options.carry:
            return carry.download(options.carry)
        if options.render:
            report.PAGE.write_text(report.render(options.results or runner.RESULTS), "utf-8")
            print(f"wrote {report.PAGE.relative_to(runner.ROOT)}")
            return 0
        commit = options.commit or (carry.commit(options.carried) if options.carried else "")
        runner.set_paths(options.carried, options.rehearse)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not options.rehearse:
        import torch

        if not torch.cuda.is_available():
            print(
                f"error: torch {torch.__version__} finds no CUDA GPU. Run on a machine that has "
                "one, or add --rehearse to run every stage on the CPU with tiny shapes.",
                file=sys.stderr,
            )
            return 2
    results = options.results or (REHEARSALS if options.rehearse else runner.RESULTS)
    settings = runner.Settings(results, options.rehearse, options.again, options.carried, commit)
    return 1 if runner.run(stages, settings) else 0


if __name__ == "__main__":
    sys.exit(main())
