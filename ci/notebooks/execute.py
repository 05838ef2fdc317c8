"""Run one notebook with papermill, in a kernel of this interpreter.

Cell output is streamed as plain lines. Child processes are ended when the notebook finishes, fails,
times out or is interrupted, and the kernel ends with this process.
"""

import contextlib
import ctypes
import difflib
import io
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import nbformat
import papermill
import psutil
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from papermill.exceptions import PapermillExecutionError

from ci.notebooks import ROOT, figures, sources

PR_SET_CHILD_SUBREAPER = 36

# Linux terminates the kernel when its parent (this process) dies.
START_KERNEL = """
import ctypes, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
from ipykernel.kernelapp import launch_new_instance
launch_new_instance()
"""


class ThisInterpreter(AsyncKernelManager):
    """Kernel manager that starts `sys.executable`, regardless of registered kernels."""

    @property
    def kernel_spec(self) -> KernelSpec:
        # Log level ERROR hides ipykernel's warning about unencrypted loopback on every start.
        argv = [sys.executable, "-c", START_KERNEL, "-f", "{connection_file}", "--log-level=40"]
        argv.append(f"--ext={figures.__name__}")
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


@dataclass
class Result:
    """Outcome of a run."""

    seconds: float
    error: str | None = None
    """The failing cell and the end of its traceback, or the faults of the figures."""

    @property
    def status(self) -> str:
        return "failed" if self.error else "passed"


class LineStream(io.TextIOBase):
    """Print whole lines with the notebook's name; only the last state of redrawn lines."""

    def __init__(self, prefix: str):
        self.prefix, self.rest = prefix, ""

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            last = line.rstrip("\r").rsplit("\r", 1)[-1]
            print(f"[{self.prefix}] {last}", flush=True)
        return len(text)

    def close(self) -> None:
        if self.rest:
            self.write("\n")
        super().close()


def check_parameters(notebooks: list[Path], parameters: dict) -> None:
    """Raise ValueError for a parameter missing in a notebook (papermill only warns)."""
    for path in notebooks:
        known = papermill.inspect_notebook(str(path))
        for name in parameters:
            if name in known:
                continue
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            listing = ", ".join(known) or "none (no cell is tagged `parameters`)"
            raise ValueError(
                f"{path.name} has no parameter {name!r}.{hint} Its parameters: {listing}. "
                "Add --only to set a parameter of one notebook."
            )


def run(path: Path, output: Path, parameters: dict, cell_timeout: int) -> Result:
    """Execute `path` in its folder, as Jupyter does, and save the result to `output`."""
    stream = LineStream(path.stem)
    before = set(psutil.Process().children(recursive=True))
    start = time.monotonic()
    error = None
    with python_path(ROOT), contextlib.closing(stream):
        try:
            papermill.execute_notebook(
                str(path),
                str(output),
                parameters=parameters,
                kernel_name="python3",
                language="python",
                cwd=str(path.parent),
                progress_bar=False,
                stdout_file=stream,
                stderr_file=stream,
                execution_timeout=cell_timeout,
                kernel_manager_class=ThisInterpreter,
                coalesce_streams=True,
            )
        except PapermillExecutionError as failure:
            tail = "\n".join(plain(failure.traceback).splitlines()[-25:])
            cause = f"{failure.ename}: {failure.evalue}".splitlines()[0]
            error = f"{path.name}, cell [{failure.exec_count}]: {cause}\n{tail}"
        except Exception as failure:  # timeout or dead kernel: continue with the next
            error = f"{path.name}: {type(failure).__name__}: {failure}"
        finally:
            terminate(set(psutil.Process().children(recursive=True)) - before)
    if error is None:
        faults = figures.faults(nbformat.read(output, as_version=4))
        if faults:
            error = "\n".join([f"{path.name}: figures with faults", *faults])
    result = Result(time.monotonic() - start, error)
    record(path, output if output.exists() else path, output, result)
    return result


def plain(traceback: list[str]) -> str:
    """Return a traceback without terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(traceback))


def record(path: Path, source: Path, output: Path, result: Result) -> None:
    """Store the outcome of notebook ``path`` in its executed copy, for the gallery and the site."""
    notebook = nbformat.read(source, as_version=4)
    notebook.metadata["nearlinear"] = {
        "status": result.status,
        "seconds": round(result.seconds, 1),
        "finished": time.strftime("%Y-%m-%d %H:%M"),
        "error": result.error or "",
        "sources": sources.key(path),
    }
    nbformat.write(notebook, output)


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants (Linux), so that `run` ends them."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def terminate(processes: set[psutil.Process], timeout: float = 5.0) -> None:
    """Send SIGTERM, then SIGKILL after ``timeout`` seconds."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=timeout)


@contextlib.contextmanager
def python_path(folder: Path):
    """Add ``folder`` to PYTHONPATH of kernels and their child processes."""
    old = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), old]))
    try:
        yield
    finally:
        if old is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = old
