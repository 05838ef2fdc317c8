"""Errors that a user of nearlinear can act on.

Every message is one line with the cause and the remedy. The command line prints the message alone
and exits with the error's code; ``--debug`` adds the traceback. Any other exception is a defect of
nearlinear and keeps its traceback.

Example::

    try:
        nl.ParallelConfig(hybrid_shard_degree=-1)
    except nl.errors.ConfigError as error:
        print(error)
"""

import signal


class NearlinearError(Exception):
    """Base class of every error that a user can act on."""

    exit_code: int = 2
    """Exit code of the command line."""
    word = "error"
    """Prefix of the message on the command line."""
    everywhere = False
    """True if all ranks of a job raise this error together, so that no rank waits for another."""


class Interrupted(NearlinearError):
    """A run received SIGTERM or Ctrl-C and saved itself."""

    word = "stopped"
    everywhere = True
    exit_code: int = 128 + signal.SIGTERM  # as after SIGTERM itself: launchers restart the process


class ConfigError(NearlinearError, ValueError):
    """A configuration key, value or combination that cannot be used."""


class DataError(NearlinearError, ValueError):
    """Token shards or input text that are missing, empty, corrupt or in an unknown format."""


class CheckpointError(NearlinearError, ValueError):
    """A checkpoint that cannot be written, is incomplete or corrupt, or belongs to another run."""

    everywhere = True


class CheckpointDamaged(CheckpointError):
    """A checkpoint whose files are missing, changed, inconsistent, or not signed as required."""


class StorageError(CheckpointError, DataError):
    """A folder or bucket of checkpoints or data that does not exist or refuses access."""


class RankFailure(NearlinearError):
    """Another rank died, is stuck or raised an error, so this rank cannot go on."""

    everywhere = True

    def __init__(self, message: str, restart: bool = True, dead_rank: int | None = None):
        super().__init__(message)
        self.dead_rank = dead_rank
        """Rank of the dead process, or None. Its in-flight checkpoint files stay incomplete."""
        # A lost rank may come back after a restart; a rank that raised an error would raise again.
        self.exit_code: int = 128 + signal.SIGTERM if restart else 1


class RankError(NearlinearError, RuntimeError):
    """Raised by `nearlinear.spmd.run` when a rank fails; the other ranks are stopped.

    ``rank`` is the first rank that failed and ``rank_traceback`` is its traceback as text. For
    ranks that are threads, ``__cause__`` is the original exception.
    """

    def __init__(self, rank: int, ranks: int, error: str, rank_traceback: str = ""):
        super().__init__(f"rank {rank} of {ranks} failed: {error}")
        self.rank = rank
        self.rank_traceback = rank_traceback

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n\n{self.rank_traceback}" if self.rank_traceback else text


def join_faults(faults: list[str], shown: int = 3) -> str:
    """Join the first ``shown`` faults in sorted order, and count the others."""
    more = f", and {len(faults) - shown} more" if len(faults) > shown else ""
    return "; ".join(sorted(faults)[:shown]) + more
