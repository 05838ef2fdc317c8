"""Compile the engine and the glue ahead of the first use.

Run ``python -m nearlinear_collectives.build``.
"""

import sys

from . import BuildError, engine_library, glue_library

if __name__ == "__main__":
    try:
        print(f"engine  {engine_library()}")
        print(f"glue    {glue_library()}")
    except BuildError as error:
        sys.exit(str(error))
