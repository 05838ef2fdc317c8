"""``python -m nearlinear_collectives.doctor [--json]``; fails if the CPU backend cannot work."""

import argparse
import sys

from nearlinear_collectives.doctor import doctor


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nearlinear_collectives.doctor",
        description="What is accelerated on this machine, what falls back, and why.",
    )
    parser.add_argument("--json", action="store_true", help="the same for programs")
    as_json = parser.parse_args().json
    report = doctor()
    print(report.to_json() if as_json else report)
    return 0 if report.works else 1


if __name__ == "__main__":
    sys.exit(main())
