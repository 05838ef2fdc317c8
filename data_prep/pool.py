"""Splits in order, in this process or in several: who does which changes nothing but time."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from data_prep.backends import encoder
from data_prep.job import Job
from data_prep.places import Place
from data_prep.progress import Progress
from data_prep.work import do_split
from nearlinear.errors import DataError


def run(job: Job, folder: Place, numbers: Iterator[int], workers: int, backends: Sequence[str],
        bar: Progress, lock: int | None = None) -> None:  # fmt: skip
    """Do the splits that `numbers` yields; each is asked for when a worker is free.

    More than one worker are processes, which a source with a `spec` alone can have. `lock` is a
    file descriptor that they keep open: whoever holds the lock of the output waits for them all.
    """
    if workers == 1 or job.source.spec is None:
        for number in numbers:
            do_split(job, number, folder, encoder(job.words, tuple(backends)), bar.advance)
            bar.finish_split(number)
        return
    turn = threading.Lock()

    def next_number() -> int | None:
        with turn:
            return next(numbers, None)

    with ThreadPoolExecutor(workers) as threads:
        crew = [_Worker(folder, backends, lock) for _ in range(workers)]
        try:
            done = [threads.submit(worker.serve, next_number, bar) for worker in crew]
            for future in wait(done, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:
            for worker in crew:
                worker.stop()


class _Worker:
    """A process of `data_prep.worker`."""

    def __init__(self, folder: Place, backends: Sequence[str], lock: int | None):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "RAYON_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-m", "data_prep.worker", str(folder), ",".join(backends)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            pass_fds=() if lock is None else (lock,),
        )

    def serve(self, next_number, bar: Progress) -> None:
        """Have the process do one split after another. Raises `DataError` when it cannot."""
        self._answer("ready", bar)
        while (number := next_number()) is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended: that it gives no answer tells
                self._process.stdin.write(f"{number}\n")
                self._process.stdin.flush()
            self._answer("done", bar)
            bar.finish_split(number)

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                pipe.close()
            except BrokenPipeError:  # it ended before it read all
                pass

    def _answer(self, kind: str, bar: Progress) -> None:
        for line in self._process.stdout:
            said = json.loads(line)
            if "error" in said:
                raise DataError(said["error"])
            if "advance" in said:
                bar.advance(*said["advance"])
            if kind in said:
                return
        code = self._process.wait()
        raise DataError(
            f"a worker ended ({code}) before its split was done: run the command again, what is "
            "done is kept; fewer --workers need less memory"
        )
