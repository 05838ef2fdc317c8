"""CUDA groups go to NCCL: whether it will gather parameters without occupying multiprocessors.

NCCL's copy engines can do an all-gather alone ("zero CTA") since 2.28 within a node and since
2.30.6 between nodes, if the group has that policy and the memory is a symmetric window. NCCL falls
back without a word where one of the conditions is not met; this says which.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from nearlinear_collectives.doctor.report import OFF, OK, SLOW, Finding

WITHIN_NODE, BETWEEN_NODES = (2, 28, 0), (2, 30, 6)
DRIVER = (12, 5)  # the CUDA version it supports
ZERO_POLICY = "2"  # of the variable NCCL_CTA_POLICY


def findings() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        why = "no GPU is visible" if torch.version.cuda else "this torch is built without CUDA"
        yield Finding("CUDA", OFF, f"{why}: nothing for NCCL to do")
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
        f"collectives on CUDA tensors go to NCCL {dotted(version)}; GPUs here: "
        f"{torch.cuda.device_count()}",
    )
    reasons = list(obstacles(version, driver_version(), peers_refuse(), os.environ))
    if not reasons:
        where = "within and between nodes" if version >= BETWEEN_NODES else "within a node"
        yield Finding(
            "zero-SM gather",
            OK,
            f"NCCL's copy engines will gather FSDP2's parameters {where}, once the model says so",
            'module.set_symm_mem_for_comm("NCCL") on every module that is sharded; where the '
            f'group was made as "cuda:nccl", also export NCCL_CTA_POLICY={ZERO_POLICY}',
        )
    for says, remedy in reasons:
        yield Finding("zero-SM gather", SLOW, says, remedy)
    if not reasons and version < BETWEEN_NODES:
        yield Finding(
            "zero-SM gather",
            SLOW,
            f"NCCL {dotted(version)} does not do it between nodes",
            f"NCCL {dotted(BETWEEN_NODES)} or newer does, with a network plugin that offers RMA",
        )


def obstacles(version, driver, refusing, environment) -> Iterator[tuple[str, str]]:
    """(what stands in the way of the copy engines, the remedy), one after the other."""
    if version < WITHIN_NODE:
        yield (
            f"NCCL {dotted(version)} cannot",
            f"a torch with NCCL {dotted(WITHIN_NODE)} or newer (between nodes "
            f"{dotted(BETWEEN_NODES)})",
        )
    if driver < DRIVER:
        yield (
            f"the GPU driver supports CUDA {dotted(driver)} only",
            f"a driver for {dotted(DRIVER)} or newer",
        )
    if not hasattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO") and (
        environment.get("NCCL_CTA_POLICY") != ZERO_POLICY
    ):
        yield ("this torch cannot ask for the policy", f"export NCCL_CTA_POLICY={ZERO_POLICY}")
    elif environment.get("NCCL_CTA_POLICY", ZERO_POLICY) != ZERO_POLICY:
        yield (
            f"NCCL_CTA_POLICY={environment['NCCL_CTA_POLICY']} asks for another policy",
            f"unset it, or export NCCL_CTA_POLICY={ZERO_POLICY}",
        )
    if not symmetric_memory():
        yield ("FSDP2 of this torch cannot gather into symmetric memory", "torch 2.13 or newer can")
    if environment.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        yield ("NCCL_P2P_DISABLE is set", "unset it")
    if refusing:
        first, second = refusing
        yield (
            f"GPUs {first} and {second} cannot reach each other's memory",
            "NVLink or PCIe peer access; virtual machines and containers must pass it through",
        )


def nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version()[:3])


def driver_version() -> tuple[int, int]:
    """The newest CUDA version that the driver supports."""
    number = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return 0, 0
    return number.value // 1000, number.value % 1000 // 10


def peers_refuse() -> tuple[int, int] | None:
    """The first two GPUs of this process without peer access."""
    gpus = range(torch.cuda.device_count())
    pairs = ((a, b) for a in gpus for b in gpus if a != b)
    return next((pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)), None)


def symmetric_memory() -> bool:
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_symm_mem_for_comm")


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
