"""``python -m nearlinear_collectives.build``: compile now what the first use would."""

import sys

from nearlinear_collectives.build import BuildError, engine_library, glue_library

if __name__ == "__main__":
    try:
        print(f"engine  {engine_library()}")
        print(f"glue    {glue_library()}")
    except BuildError as error:
        sys.exit(str(error))
