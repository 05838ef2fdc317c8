"""Some files of tokens laid end to end, of which pieces are read at random.

A file is mapped when it is first read, so that a stream of any size opens at once.
"""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable

import numpy as np

MOST_OPEN = max(16, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
"""files of a stream that are mapped at a time; each map holds one of the numbers of open files"""


class Stream:
    """Files that hold `counts` tokens; `open_(file)` gives one as what numpy slices, [tokens]."""

    def __init__(self, counts: list[int], open_: Callable[[int], np.ndarray]):
        self.ends = np.cumsum(np.array(counts, dtype=np.int64))
        self.starts = self.ends - counts
        self.file = functools.lru_cache(MOST_OPEN)(open_)

    @property
    def tokens(self) -> int:
        return int(self.ends[-1])

    def pieces(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Ranges [begin, end) of the stream in its files: int64 [pieces, 4] of the range's number,
        file, first token, end there. Where a range goes on in the next file there are two, or more.
        """
        row, file = np.arange(len(begin)), np.searchsorted(self.ends, begin, side="right")
        found = []
        while True:
            stop, offset = np.minimum(end, self.ends[file]), self.starts[file]
            part = np.empty((len(row), 4), dtype=np.int64)
            part[:, 0], part[:, 1] = row, file
            part[:, 2], part[:, 3] = begin - offset, stop - offset
            found.append(part)
            rest = stop < end
            if not rest.any():
                break
            begin, end, row, file = stop[rest], end[rest], row[rest], file[rest] + 1
        return found[0] if len(found) == 1 else np.concatenate(found)

    def read(self, pieces: np.ndarray, out: np.ndarray) -> tuple[list[int], list[int]]:
        """Fill the rows of `out` [N, L] from the left: `pieces` as above, by number of row.

        Returns each piece's place in the rows laid end to end, and how many of each row are filled.
        """
        places, filled, length = [], [0] * len(out), out.shape[1]
        for row, file, start, stop in pieces.tolist():
            first = filled[row]
            filled[row] = first + stop - start
            places.append(row * length + first)
            out[row, first : filled[row]] = self.file(file)[start:stop]
        return places, filled
