"""Entry point of ``python -m nearlinear.cli``, for torchrun and other launchers."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
