"""The rank side of `ranks.Pool`: a server that has imported torch and forks one rank per request.

A new rank then costs milliseconds instead of the seconds of an import. The server never computes or
communicates, so it has a single thread and its forks are safe. It reaps ended ranks on request
only. Until then they are zombies, as under a slow launcher, and their process ids still exist.
"""

import contextlib
import ctypes
import dataclasses
import datetime
import faulthandler
import gc
import importlib
import json
import os
import pickle
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection

PRELOADED = (
    "hypothesis",
    "numpy",
    "pytest",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "nearlinear_collectives",
)


@dataclasses.dataclass
class Call:
    """A request of the pool to one rank."""

    function: object
    args: tuple
    rank: int
    size: int
    store_port: int
    name: str
    backend: str | None = None
    timeout: float = 60.0


@dataclasses.dataclass
class Outcome:
    """Outcome of a call: a value, an exception, or the end of the process."""

    value: object = None
    error: str = ""
    traceback: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error)


current: Call | None = None


def current_size() -> int:
    return current.size


def store(name: str = ""):
    """Connect to the store of the current call, which the pool's process hosts like a launcher."""
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=current.timeout)
    client = dist.TCPStore("127.0.0.1", current.store_port, is_master=False, timeout=timeout)
    return dist.PrefixStore(f"{current.name}/{name}", client)


def join(backend: str, timeout: float | None = None, name: str = "world", **options) -> None:
    """Create the default group of all ranks of the current call."""
    import torch.distributed as dist

    if "nearlinear" in backend:
        importlib.import_module("nearlinear_collectives")
    seconds = current.timeout if timeout is None else timeout
    dist.init_process_group(
        backend,
        store=store(name),
        rank=current.rank,
        world_size=current.size,
        timeout=datetime.timedelta(seconds=seconds),
        **options,
    )


def announce(key: str) -> None:
    """Report to the pool's process (`ranks.Case.heard`) that this rank has reached a point."""
    store().set(f"{key}/{current.rank}", b"1")


def answer(call: Call) -> Outcome:
    global current
    current = call
    try:
        if call.backend:
            join(call.backend)
        return Outcome(value=call.function(call.rank, *call.args))
    except BaseException as error:
        return failure(error)


def leave() -> Outcome | None:
    import torch.distributed as dist

    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        return failure(error)
    return None


def failure(error: BaseException) -> Outcome:
    return Outcome(error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())


def send(connection: Connection, thing) -> None:
    """Use plain pickle, because that of multiprocessing would put tensors into shared memory."""
    connection.send_bytes(pickle.dumps(thing))


def receive(connection: Connection):
    return pickle.loads(connection.recv_bytes())


def serve_calls(connection: Connection) -> None:
    while True:
        try:
            call = receive(connection)
        except EOFError:
            return
        if call is None:  # every rank has answered, so no slower rank still uses a group
            send(connection, leave())
        else:
            send(connection, answer(call))


def be_a_rank(connection: Connection, output: str, server: int) -> None:
    """Run a forked rank, which ends with the server."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != server:
        os._exit(1)
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with contextlib.suppress(BrokenPipeError):
        serve_calls(connection)


def serve_forks(control: socket.socket) -> None:
    server = os.getpid()
    while True:
        message, handles, _, _ = socket.recv_fds(control, 65536, 1)
        if not message:
            return
        if message == b"reap":
            control.send(json.dumps(reap()).encode())
            continue
        child = os.fork()
        if child == 0:
            control.close()
            be_a_rank(Connection(handles[0]), message.decode(), server)
            sys.stdout.flush()
            os._exit(0)
        os.close(handles[0])
        control.send(str(child).encode())


def reap() -> dict[int, int]:
    """Reap the ended ranks: {pid: exit code, negative for a signal}."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def main(handle: int) -> None:
    for module in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    gc.freeze()  # else a collection in a rank visits, and thereby copies, all imported objects
    serve_forks(socket.socket(fileno=handle))
