"""A worker process: does the splits whose numbers it reads, and tells how far it is.

`python -m data_prep.worker FOLDER BACKENDS` reads a number a line from stdin and writes a line of
JSON to stdout now and then. It ends when stdin does: a worker never outlives who started it.
"""

import json
import os
import queue
import signal
import sys
import threading
import time

_SECONDS_BETWEEN_LINES = 0.2


def main(folder: str, backends: str) -> None:
    """Serve one preparation until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it decides what Ctrl-C means
    numbers: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(numbers,), daemon=True).start()
    try:
        from data_prep import places
        from data_prep.backends import encoder
        from data_prep.job import Job
        from data_prep.work import do_split

        place = places.at(folder)
        job = Job.load(place)
        encode = encoder(job.words, tuple(backends.split(",")))
        _say(ready=encode.name)
        while True:
            number = int(numbers.get())
            told = _Told()
            do_split(job, number, place, encode, told.advance)
            told.say()
            _say(done=number)
    except BrokenPipeError:  # who started it is gone
        os._exit(0)
    except Exception as error:
        from nearlinear.errors import NearlinearError

        ours = isinstance(error, (NearlinearError, OSError))
        _say(error=str(error) if ours else f"{type(error).__name__}: {error}")
        raise SystemExit(2) from (None if ours else error)


class _Told:
    """Sums up what `advance` hears, and says it a few times a second."""

    def __init__(self):
        self._counts, self._last = [0, 0, 0], time.monotonic()

    def advance(self, documents: int, bytes: int, tokens: int) -> None:
        self._counts = [a + b for a, b in zip(self._counts, (documents, bytes, tokens),
                                              strict=True)]  # fmt: skip
        if time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self.say()

    def say(self) -> None:
        _say(advance=self._counts)
        self._counts, self._last = [0, 0, 0], time.monotonic()


def _listen(numbers: queue.Queue) -> None:
    for line in sys.stdin:
        numbers.put(line)
    os._exit(0)


def _say(**what) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
