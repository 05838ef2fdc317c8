"""The parser that commands of ``ci`` share."""

import argparse


def make_parser(
    module: str, description: str | None, examples: str | None = None
) -> argparse.ArgumentParser:
    """Return a parser for ``python -m MODULE`` that keeps the line breaks of its texts."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
