"""Process input splits in this process or in several worker processes, with the same result."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from data_prep.encoders import get_encoder
from data_prep.plan import PreparationPlan
from data_prep.process_split import process_split
from data_prep.progress import Progress
from nearlinear.errors import DataError
from nearlinear.storage import StoragePath


def run(
    plan: PreparationPlan,
    folder: StoragePath,
    numbers: Iterator[int],
    workers: int,
    backends: Sequence[str],
    progress: Progress,
    lock_descriptor: int | None = None,
) -> None:
    """Process the input splits that `numbers` yields, each when a worker is free.

    Several workers are processes, which need a source with a `spec`.

    Args:
        lock_descriptor: File descriptor that workers inherit, so that the output stays locked until
            the last worker has ended.
    """
    if workers == 1 or plan.source.spec is None:
        for number in numbers:
            encoder = get_encoder(plan.tokenizer, tuple(backends))
            process_split(plan, number, folder, encoder, progress.advance)
            progress.finish_split(number)
        return
    numbers_lock = threading.Lock()

    def next_number() -> int | None:
        with numbers_lock:
            return next(numbers, None)

    with ThreadPoolExecutor(workers) as threads:
        processes = [_WorkerProcess(folder, backends, lock_descriptor) for _ in range(workers)]
        try:
            done = [threads.submit(worker.serve, next_number, progress) for worker in processes]
            for future in wait(done, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:
            for worker in processes:
                worker.stop()


class _WorkerProcess:
    """A process of `data_prep.worker`."""

    def __init__(self, folder: StoragePath, backends: Sequence[str], lock_descriptor: int | None):
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
            pass_fds=() if lock_descriptor is None else (lock_descriptor,),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def serve(self, next_number: Callable[[], int | None], progress: Progress) -> None:
        """Let the process work on one split after another. Raises `DataError` if it fails."""
        self._wait_for("ready", progress)
        while (number := next_number()) is not None:
            with contextlib.suppress(BrokenPipeError):  # _wait_for reports a dead process
                self._stdin.write(f"{number}\n")
                self._stdin.flush()
            self._wait_for("done", progress)
            progress.finish_split(number)

    def stop(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(
                BrokenPipeError
            ):  # the process ended before it read everything
                pipe.close()

    def _wait_for(self, kind: str, progress: Progress) -> None:
        for line in self._stdout:
            message = json.loads(line)
            if "error" in message:
                raise DataError(message["error"])
            if "advance" in message:
                progress.advance(*message["advance"])
            if kind in message:
                return
        code = self._process.wait()
        raise DataError(
            f"a worker ended (exit code {code}) before its input split was done: run the command "
            "again, finished splits are kept; reduce --workers to use less memory"
        )
