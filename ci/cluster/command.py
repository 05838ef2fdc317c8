"""What a command that runs jobs on a cluster returns to the shell."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ci.cluster.namespaces import ClusterError, why_not
from ci.cluster.ranks import RankFailed


def status_of(command: Callable[[], int], refused: type[Exception] = ValueError) -> int:
    """Its own status, or that of what went wrong, which is said on stderr.

    1: a rank failed; 2: no cluster can be had here, or the command has ``refused`` its request;
    130: interrupted.
    """
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    try:
        return command()
    except (ClusterError, ValueError, refused) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RankFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
