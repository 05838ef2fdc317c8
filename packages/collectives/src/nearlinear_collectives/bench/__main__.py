"""The command line. Exit status 0; 1: wrong data or a failure; 2: a request to correct."""

import os
import sys
import traceback
from pathlib import Path

from . import options as command_line
from . import ranks
from .errors import UsageError

MODULE = "nearlinear_collectives.bench"


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    first = os.environ.get("RANK", "0") == "0"
    try:
        options = command_line.parse(arguments)
        if options.spawned:
            ranks.obey(int(options.spawned[0]))
        elif not ranks.joined():
            from . import backends, session

            session.check(options, options.ranks, options.ranks)
            backends.prepare(backends.parse(options.backends))
            return ranks.start(MODULE, arguments, options.ranks)
    except UsageError as error:
        if first:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return _rank(options, arguments, first)


def _rank(options, arguments: list[str], first: bool) -> int:
    """One rank's work. A rank that failed leaves at once: the others may be gone."""
    import torch.distributed as dist

    from . import session

    try:
        session.check(options, int(os.environ["WORLD_SIZE"]), ranks.local_ranks())
        ranks.meet(Path(options.spawned[1]) if options.spawned else None, options.timeout)
        status = session.run(options, _shown(arguments), ranks.local_ranks())
        dist.barrier()
        dist.destroy_process_group()
        return status
    except UsageError as error:
        if first:
            print(f"error: {error}", file=sys.stderr, flush=True)
        status = 2
    except Exception as error:
        if not isinstance(error, RuntimeError):  # torch's word for what a backend could not do
            traceback.print_exc()
        notes = " ".join(["", *getattr(error, "__notes__", [])])
        print(f"\nerror: rank {os.environ['RANK']}{notes}: {error}", file=sys.stderr, flush=True)
        status = 1
    sys.stdout.flush()
    os._exit(status)


def _shown(arguments: list[str]) -> list[str]:
    """The command line without what is only between our own processes."""
    if "--spawned" not in arguments:
        return arguments
    at = arguments.index("--spawned")
    return arguments[:at] + arguments[at + 3 :]


if __name__ == "__main__":
    sys.exit(main())
