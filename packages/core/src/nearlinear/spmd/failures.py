"""What `run` raises when a rank fails: the rank, its error, and the rank's own traceback."""

from ..errors import NearlinearError


class RankError(NearlinearError, RuntimeError):
    """One rank failed and the others were stopped.

    ``rank`` is the first rank that failed and ``rank_traceback`` its traceback as text. For ranks
    that are threads ``__cause__`` is the original exception.
    """

    def __init__(self, rank: int, ranks: int, error: str, rank_traceback: str = ""):
        super().__init__(f"rank {rank} of {ranks} failed: {error}")
        self.rank = rank
        self.rank_traceback = rank_traceback

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n\n{self.rank_traceback}" if self.rank_traceback else text
