"""Checks of the libraries between ranks and nodes: TCP interface, libfabric and EFA, gloo, NCCL."""

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
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from .. import engine_library as engine
from ..build import BuildError
from ..group import raise_for_status
from .finding import OFF, OK, SLOW, Finding

TRANSPORT = "NEARLINEAR_COLLECTIVES_TRANSPORT"
INTERFACE = "NEARLINEAR_COLLECTIVES_INTERFACE"
INFINIBAND = Path("/sys/class/infiniband")
MAX_LOOKUP_SECONDS = 1.0  # for resolving this machine's own name

# NCCL all-gathers on copy engines alone ("zero CTA") since these versions, if the group has that
# policy and the memory is a symmetric window. It falls back silently if a condition is not met.
ZERO_CTA_WITHIN_NODE, ZERO_CTA_BETWEEN_NODES = (2, 28, 0), (2, 30, 6)
MIN_DRIVER = (12, 5)  # CUDA version that the driver must support
ZERO_CTA_POLICY = "2"  # value of the variable NCCL_CTA_POLICY


def check_network() -> Iterator[Finding]:
    """Check the paths between nodes, then NCCL."""
    if sys.platform == "linux" and _engine_loads():  # check_host() reports a missing engine
        yield check_interface()
        yield check_libfabric()
        yield check_gloo()
    yield from check_nccl()


def _engine_loads() -> bool:
    try:
        engine.library()
    except (BuildError, ImportError):
        return False
    return True


# --- between nodes -------------------------------------------------------------------------------


def check_interface() -> Finding:
    """Check the network interface that groups over several nodes would use."""
    chosen = os.environ.get(TRANSPORT) or "tcp"
    try:
        text = describe_transport(chosen)
    except (RuntimeError, ValueError) as error:
        return Finding(
            "network",
            OFF,
            f"groups over several nodes cannot be created: {error}",
            f"set {INTERFACE} to an interface that the other nodes can reach",
        )
    if "127.0.0.1" in text or "(::1)" in text:
        return Finding(
            "network",
            OFF,
            f"{text}: other nodes cannot reach this address",
            f"irrelevant on one machine; otherwise set {INTERFACE} to an interface",
        )
    return Finding("network", OK, f"between nodes: {text}")


def describe_transport(name: str) -> str:
    """Return the engine's description of a transport, by opening a group of two."""
    options = engine.Options(0, 2, 1000, b"doctor", None)
    peer_info, handle = ctypes.create_string_buffer(engine.PEER_INFO_BYTES), ctypes.c_void_p()
    library = engine.library()
    with _environment_variable(TRANSPORT, name):
        raise_for_status(
            library.nlc_group_open(ctypes.byref(options), peer_info, ctypes.byref(handle))
        )
    try:
        return engine.read_json(library.nlc_describe, handle)["network"]
    finally:
        library.nlc_group_close(handle)


@contextlib.contextmanager
def _environment_variable(name: str, value: str) -> Iterator[None]:
    old = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old


def check_libfabric() -> Finding:
    name, used = "libfabric", os.environ.get(TRANSPORT) == "ofi"
    adapters = efa_adapters()
    present = f"EFA adapters are present ({', '.join(adapters)})"
    install = (
        "install the EFA software of the cloud provider, or set "
        "NEARLINEAR_COLLECTIVES_LIBFABRIC to the path of its library"
    )
    try:
        text = describe_transport("ofi")
    except (RuntimeError, ValueError) as error:
        if adapters:
            return Finding(name, SLOW, f"{present}, but cannot be used: {error}", install)
        return Finding(name, OFF, f"not used, and there is no EFA adapter ({error})")
    if names := provider_names():
        text += f"; providers: {', '.join(names)}"
    if adapters and "(efa" not in text:
        return Finding(
            name, SLOW, f"{present}, but this library does not find them: {text}", install
        )
    if adapters and not used:
        return Finding(
            name,
            SLOW,
            f"{present}, but TCP is used instead of {text}",
            f"set {TRANSPORT}=ofi on all nodes",
        )
    return Finding(name, OK, f"{'used' if used else 'available, but TCP is used'}: {text}")


def efa_adapters() -> list[str]:
    def driver(adapter: Path) -> str:
        return os.path.basename(os.path.realpath(adapter / "device" / "driver"))

    adapters = sorted(INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    return [adapter.name for adapter in adapters if driver(adapter) == "efa"]


def provider_names() -> list[str]:
    """Return the providers that fi_info lists; empty if it is not installed."""
    tool = shutil.which("fi_info") or shutil.which("fi_info", path="/opt/amazon/efa/bin")
    if tool is None:
        return []
    try:
        listed = subprocess.run([tool, "-l"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.rstrip(":") for line in listed.splitlines() if line.endswith(":")]


def check_gloo() -> Finding:
    """Check gloo, which runs a few other operations and resolves this machine's own name."""
    name, operations = "gloo", "operations on sparse tensors and products of complex numbers"
    if not dist.is_gloo_available():
        return Finding(name, OFF, f"this torch has no gloo: {operations} do not work")
    remedy = "set GLOO_SOCKET_IFNAME to the interface, or add the machine to /etc/hosts"
    begin = time.monotonic()
    try:
        dist.ProcessGroupGloo.create_default_device(lazy_init=True)
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        message = f"cannot be created, so {operations} do not work: {first}"
        return Finding(name, OFF, message, remedy)
    seconds = time.monotonic() - begin
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        interface = os.environ["GLOO_SOCKET_IFNAME"]
        return Finding(name, OK, f"runs {operations}, over GLOO_SOCKET_IFNAME={interface}")
    if seconds > MAX_LOOKUP_SECONDS:
        return Finding(
            name,
            SLOW,
            f"runs {operations}, but resolving {socket.gethostname()} takes {seconds:.0f} s "
            "for each group",
            remedy,
        )
    address = own_address()
    if address is None or address.is_loopback:
        resolved = f"resolves to {address}" if address else "cannot be resolved"
        return Finding(
            name,
            OFF,
            f"runs {operations} on this machine only: {socket.gethostname()} {resolved}, "
            "which other nodes cannot reach",
            f"with several nodes: {remedy}",
        )
    return Finding(name, OK, f"runs {operations}, at {address}")


def own_address() -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Resolve this machine's name as gloo does, and return the first address."""
    try:
        first, *_ = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return ipaddress.ip_address(str(first[4][0]).partition("%")[0])


# --- NCCL ----------------------------------------------------------------------------------------


def check_nccl() -> Iterator[Finding]:
    """Check NCCL, and whether it can all-gather parameters without occupying SMs."""
    if not torch.cuda.is_available():
        reason = "no GPU is visible" if torch.version.cuda else "this torch is built without CUDA"
        yield Finding("CUDA", OFF, f"{reason}; NCCL is not used")
        return
    if not dist.is_nccl_available():
        yield Finding(
            "CUDA",
            OFF,
            "this torch has no NCCL: CUDA tensors have no collectives",
            "install a build of torch with NCCL",
        )
        return
    version = nccl_version()
    yield Finding(
        "CUDA",
        OK,
        f"collectives on CUDA tensors use NCCL {_dotted(version)}; GPUs here: "
        f"{torch.cuda.device_count()}",
    )
    obstacles = list(
        zero_cta_obstacles(version, driver_version(), gpus_without_peer_access(), os.environ)
    )
    if not obstacles:
        everywhere = version >= ZERO_CTA_BETWEEN_NODES
        where = "within and between nodes" if everywhere else "within a node"
        yield Finding(
            "zero-SM gather",
            OK,
            f"NCCL's copy engines can gather FSDP2's parameters {where}, if the model enables it",
            'call module.set_symm_mem_for_comm("NCCL") on every sharded module; if the group was '
            f'created as "cuda:nccl", also export NCCL_CTA_POLICY={ZERO_CTA_POLICY}',
        )
    for message, remedy in obstacles:
        yield Finding("zero-SM gather", SLOW, message, remedy)
    if not obstacles and version < ZERO_CTA_BETWEEN_NODES:
        yield Finding(
            "zero-SM gather",
            SLOW,
            f"NCCL {_dotted(version)} does not support it between nodes",
            f"use NCCL {_dotted(ZERO_CTA_BETWEEN_NODES)} or newer, with a network plugin that "
            "offers RMA",
        )


def zero_cta_obstacles(
    version: tuple[int, ...],
    driver: tuple[int, ...],
    unreachable: tuple[int, int] | None,
    environment: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    """Yield (message, remedy) of everything that prevents NCCL from using its copy engines.

    Args:
        version: NCCL's version.
        driver: Newest CUDA version that the driver supports.
        unreachable: Two GPUs without peer access, or None.
        environment: Environment variables.
    """
    if version < ZERO_CTA_WITHIN_NODE:
        yield (
            f"NCCL {_dotted(version)} does not support it",
            f"use a torch with NCCL {_dotted(ZERO_CTA_WITHIN_NODE)} or newer (between nodes "
            f"{_dotted(ZERO_CTA_BETWEEN_NODES)})",
        )
    if driver < MIN_DRIVER:
        yield (
            f"the GPU driver supports CUDA {_dotted(driver)} only",
            f"install a driver for {_dotted(MIN_DRIVER)} or newer",
        )
    policy = environment.get("NCCL_CTA_POLICY")
    export = f"export NCCL_CTA_POLICY={ZERO_CTA_POLICY}"
    can_request = hasattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO")
    if not can_request and policy != ZERO_CTA_POLICY:
        yield "this torch cannot request the policy", export
    elif policy not in (None, ZERO_CTA_POLICY):
        yield f"NCCL_CTA_POLICY={policy} requests another policy", f"unset it, or {export}"
    if not has_symmetric_memory():
        yield (
            "FSDP2 of this torch cannot gather into symmetric memory",
            "use torch 2.13 or newer",
        )
    if environment.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        yield "NCCL_P2P_DISABLE is set", "unset it"
    if unreachable:
        first, second = unreachable
        yield (
            f"GPUs {first} and {second} cannot reach each other's memory",
            "NVLink or PCIe peer access; virtual machines and containers must pass it through",
        )


def nccl_version() -> tuple[int, ...]:
    from torch.cuda import nccl

    return tuple(nccl.version()[:3])


def driver_version() -> tuple[int, int]:
    """Return the newest CUDA version that the driver supports, or (0, 0) without a driver."""
    number = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return 0, 0
    return number.value // 1000, number.value % 1000 // 10


def gpus_without_peer_access() -> tuple[int, int] | None:
    """Return the first two GPUs of this process without peer access, or None."""
    gpus = range(torch.cuda.device_count())
    pairs = ((a, b) for a in gpus for b in gpus if a != b)
    return next((pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)), None)


def has_symmetric_memory() -> bool:
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_symm_mem_for_comm")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
