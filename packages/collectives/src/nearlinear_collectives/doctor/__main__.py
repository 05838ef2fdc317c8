"""Command line of the doctor; the exit status is 1 if the CPU backend cannot work."""

import argparse
import sys

from . import doctor


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nearlinear_collectives.doctor",
        description="Report accelerated features and fallbacks on this machine, with the reasons.",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    as_json = parser.parse_args().json
    report = doctor()
    print(report.to_json() if as_json else report)
    return 0 if report.works else 1


if __name__ == "__main__":
    sys.exit(main())
