"""Between nodes: the interface that is used, libfabric and EFA, and gloo, which does the rest."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from nearlinear_collectives import engine_library as engine
from nearlinear_collectives.build import BuildError
from nearlinear_collectives.doctor.report import OFF, OK, SLOW, Finding
from nearlinear_collectives.group import checked

TRANSPORT = "NEARLINEAR_COLLECTIVES_TRANSPORT"
INTERFACE = "NEARLINEAR_COLLECTIVES_INTERFACE"
INFINIBAND = Path("/sys/class/infiniband")
LONG = 1.0  # seconds that looking up one's own name may take


def findings() -> Iterator[Finding]:
    if sys.platform != "linux":
        return
    try:
        engine.library()
    except (BuildError, ImportError):
        return  # said already
    yield network()
    yield libfabric()
    yield gloo()


def network() -> Finding:
    chosen = os.environ.get(TRANSPORT) or "tcp"
    try:
        text = transport(chosen)
    except (RuntimeError, ValueError) as error:
        return Finding(
            "network",
            OFF,
            f"groups over several nodes cannot be made: {error}",
            f"name an interface that the other nodes reach in {INTERFACE}",
        )
    if "127.0.0.1" in text or "(::1)" in text:
        return Finding(
            "network",
            OFF,
            f"{text}: no other node reaches this address",
            f"of no matter on one machine; otherwise name an interface in {INTERFACE}",
        )
    return Finding("network", OK, f"between nodes: {text}")


def transport(name: str) -> str:
    """How the engine would talk to other nodes: what a group of two says before it has met."""
    options = engine.Options(0, 2, 1000, b"doctor", None)
    card, handle = ctypes.create_string_buffer(engine.CARD_BYTES), ctypes.c_void_p()
    with setting(TRANSPORT, name):
        checked(engine.library().nlc_group_open(ctypes.byref(options), card, ctypes.byref(handle)))
    try:
        return engine.read_json(engine.library().nlc_describe, handle)["network"]
    finally:
        engine.library().nlc_group_close(handle)


@contextlib.contextmanager
def setting(name: str, value: str) -> Iterator[None]:
    old = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old


def libfabric() -> Finding:
    name, used = "libfabric", os.environ.get(TRANSPORT) == "ofi"
    adapters = efa_adapters()
    here = f"EFA adapters are here ({', '.join(adapters)})"
    install = (
        "install the EFA software of the cloud provider, or name its library in "
        "NEARLINEAR_COLLECTIVES_LIBFABRIC"
    )
    try:
        text = transport("ofi")
    except (RuntimeError, ValueError) as error:
        if adapters:
            return Finding(name, SLOW, f"{here}, but cannot be used: {error}", install)
        return Finding(name, OFF, f"not used, and no EFA adapter here ({error})")
    if names := provider_names():
        text += f"; providers: {', '.join(names)}"
    if adapters and "(efa" not in text:
        return Finding(name, SLOW, f"{here}, but this library does not see them: {text}", install)
    if adapters and not used:
        return Finding(
            name,
            SLOW,
            f"{here}, but TCP is used instead of {text}",
            f"set {TRANSPORT}=ofi on all nodes",
        )
    return Finding(name, OK, f"{'used' if used else 'there, but TCP is used'}: {text}")


def efa_adapters() -> list[str]:
    def driver(adapter: Path) -> str:
        return os.path.basename(os.path.realpath(adapter / "device" / "driver"))

    adapters = sorted(INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    return [adapter.name for adapter in adapters if driver(adapter) == "efa"]


def provider_names() -> list[str]:
    """What libfabric's own tool lists, where it is installed."""
    tool = shutil.which("fi_info") or shutil.which("fi_info", path="/opt/amazon/efa/bin")
    if tool is None:
        return []
    try:
        listed = subprocess.run([tool, "-l"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.rstrip(":") for line in listed.splitlines() if line.endswith(":")]


def gloo() -> Finding:
    """What the engine does not do goes to gloo, which believes this machine's own name."""
    name, does = "gloo", "send and recv, gather, scatter, all_to_all, reduce"
    if not dist.is_gloo_available():
        return Finding(name, OFF, f"not in this torch: {does} do not work")
    remedy = "name the interface in GLOO_SOCKET_IFNAME, or the machine in /etc/hosts"
    begin = time.monotonic()
    try:
        dist.ProcessGroupGloo.create_default_device(lazy_init=True)
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        return Finding(name, OFF, f"cannot be set up, so {does} do not work: {first}", remedy)
    took = time.monotonic() - begin
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return Finding(
            name, OK, f"does {does}, over GLOO_SOCKET_IFNAME={os.environ['GLOO_SOCKET_IFNAME']}"
        )
    if took > LONG:
        return Finding(
            name,
            SLOW,
            f"does {does}, but looking up {socket.gethostname()} took {took:.0f} s, "
            "for each group anew",
            remedy,
        )
    address = own_address()
    if address is None or address.is_loopback:
        found = f"is {address}" if address else "cannot be looked up"
        return Finding(
            name,
            OFF,
            f"does {does} on this machine only: {socket.gethostname()} {found}, "
            "where other nodes do not reach it",
            f"with several nodes: {remedy}",
        )
    return Finding(name, OK, f"does {does}, at {address}")


def own_address() -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The first address that this machine's name stands for, as gloo looks it up."""
    try:
        first, *_ = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return ipaddress.ip_address(first[4][0].partition("%")[0])
