"""Rendezvous of a job's ranks: a store on one address, and loopback for jobs of one machine.

torch's TCPStore has no authentication and listens on every interface, unless it is given a socket.
Here it gets a socket that is bound to the address of the rendezvous: loopback for the ranks of one
machine, the interface behind ``MASTER_ADDR`` for several. The store holds numbers, addresses and
JSON. Nothing of nearlinear unpickles bytes that arrive through it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import itertools
import logging
import os
import socket
import struct
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from ..config.parallel import whole_number

log = logging.getLogger(__name__)
_groups = itertools.count()  # of this process

_SIOCGIFADDR = 0x8915  # linux/sockios.h

LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT = timedelta(minutes=30)
"""Time that a rank waits for the process that holds the store; torch's default for ``env://``."""


def serve_store(host: str, port: int, *, all_local: bool) -> dist.TCPStore:
    """Hold the store of a job in this process and listen on the address of ``host`` only.

    Args:
        host: Name or address at which the ranks reach this machine.
        port: TCP port; 0 for a free one, which ``store.port`` names.
        all_local: True if all ranks run on this machine, so that loopback addresses suffice.
    """
    return hold_store(host, listen(host, port, all_local=all_local))


def hold_store(host: str, listener: socket.socket) -> dist.TCPStore:
    """Hold the store of a job in this process, on a socket of `listen`."""
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=JOIN_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(rank: int, host: str, port: int, *, all_local: bool) -> dist.TCPStore:
    """Connect to the store of a job whose rank 0 holds it, and hold it on rank 0."""
    if rank == 0:
        return serve_store(host, port, all_local=all_local)
    return dist.TCPStore(host, port, is_master=False, timeout=JOIN_TIMEOUT)


def all_ranks_are_local() -> bool:
    """Return True if the launcher's variables say that all ranks run on this machine."""
    if "WORLD_SIZE" not in os.environ:
        return True
    if os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE"):
        return True
    return is_loopback(os.environ.get("MASTER_ADDR", ""))


def is_loopback(host: str) -> bool:
    """Return True for localhost and for literal loopback addresses."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def loopback_variables() -> dict[str, str]:
    """Return variables that make gloo and NCCL listen on loopback only.

    They replace interfaces that the environment names for the links between machines.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), names[0]) if names else {}


@contextlib.contextmanager
def interface_to(host: str, port: int) -> Iterator[None]:
    """Make gloo and nearlinear-collectives listen on the interface that leads to ``host``.

    For groups that this block creates. They would otherwise use that of the job's own ranks.
    """
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        own = probe.getsockname()[0]
    found = [each for _, each in socket.if_nameindex() if _address_of(each) == own]
    if found:
        os.environ[name] = found[0]
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _address_of(interface: str) -> str:
    """Return the IPv4 address of an interface, or an empty string."""
    request = struct.pack("256s", interface[:15].encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    return ""


def launched_by_agent() -> bool:
    """Return True if a launcher holds the store: torchrun's agent, or `nearlinear.launch.local`."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect_ranks(backend: str) -> None:
    """Create the default process group of the ranks that a launcher has started.

    May be called again after `destroy_process_group`, by all ranks equally often.
    """
    all_local = all_ranks_are_local()
    if all_local:
        os.environ.update(loopback_variables())
    rank, world = whole_number("RANK"), whole_number("WORLD_SIZE")
    host, port = os.environ["MASTER_ADDR"], whole_number("MASTER_PORT")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # The store outlives the group: addresses of an earlier group must not be read.
    store = dist.PrefixStore(
        f"attempt {attempt}, group {next(_groups)}", _store_of_job(rank, host, port, all_local)
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


@functools.cache
def _store_of_job(rank: int, host: str, port: int, all_local: bool) -> dist.TCPStore:
    """Connect to the store of this job once in a process; rank 0 holds it if no launcher does."""
    if launched_by_agent():
        return dist.TCPStore(host, port, is_master=False, timeout=JOIN_TIMEOUT)
    return join_store(rank, host, port, all_local=all_local)


def listen(host: str, port: int, *, all_local: bool) -> socket.socket:
    """Return a listening socket on the address of ``host`` only; arguments as in `serve_store`."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    refused = ""
    for family, _, _, _, address in found:
        own, number = str(address[0]).partition("%")[0], int(address[1])
        if not all_local and ipaddress.ip_address(own).is_loopback:
            refused = f"{host} is {own} here, which other machines cannot reach"
            continue
        try:
            return socket.create_server((own, number), family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            refused = f"{host} ({own}): {error.strerror}"
    if all_local:
        raise OSError(f"cannot listen on {refused}")
    log.warning(
        "rendezvous: %s; the job's store therefore listens on all interfaces. Set MASTER_ADDR to "
        "an address of this machine, or restrict the port %d by network policy",
        refused,
        port,
    )
    return socket.create_server(("", port), backlog=socket.SOMAXCONN)
