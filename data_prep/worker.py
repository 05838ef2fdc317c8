"""A worker process: processes the input splits whose numbers it reads, and reports progress.

`python -m data_prep.worker FOLDER BACKENDS` reads one number per line from stdin and writes lines
of JSON to stdout. The worker ends when stdin does, so it never outlives its parent.
"""

import json
import os
import queue
import signal
import sys
import threading
import time

_LINE_INTERVAL = 0.2  # seconds


def main(folder: str, backends: str) -> None:
    """Work on one preparation until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    numbers: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_numbers, args=(numbers,), daemon=True).start()
    try:
        from data_prep.encoders import get_encoder
        from data_prep.plan import PreparationPlan
        from data_prep.process_split import process_split
        from data_prep.storage_paths import absolute_path

        path = absolute_path(folder)
        plan = PreparationPlan.load(path)
        encoder = get_encoder(plan.tokenizer, tuple(backends.split(",")))
        _send(ready=encoder.name)
        while True:
            number = int(numbers.get())
            reporter = _ProgressReporter()
            process_split(plan, number, path, encoder, reporter.advance)
            reporter.send()
            _send(done=number)
    except BrokenPipeError:  # the parent has ended
        os._exit(0)
    except Exception as error:
        from nearlinear.errors import NearlinearError

        is_user_error = isinstance(error, (NearlinearError, OSError))
        _send(error=str(error) if is_user_error else f"{type(error).__name__}: {error}")
        raise SystemExit(2) from (None if is_user_error else error)


class _ProgressReporter:
    """Sums progress and sends it a few times per second."""

    def __init__(self):
        self._counts, self._last = [0, 0, 0], time.monotonic()

    def advance(self, documents: int, bytes: int, tokens: int) -> None:
        more = (documents, bytes, tokens)
        self._counts = [a + b for a, b in zip(self._counts, more, strict=True)]
        if time.monotonic() - self._last >= _LINE_INTERVAL:
            self.send()

    def send(self) -> None:
        _send(advance=self._counts)
        self._counts, self._last = [0, 0, 0], time.monotonic()


def _read_numbers(numbers: queue.Queue[str]) -> None:
    for line in sys.stdin:
        numbers.put(line)
    os._exit(0)


def _send(**message: object) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
