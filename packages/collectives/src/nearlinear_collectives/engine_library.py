"""ctypes declarations of the engine's C interface (engine/nearlinear_collectives.h)."""

from __future__ import annotations

import ctypes
import functools
import json
import logging
from collections.abc import Callable
from typing import Any

from .build import SHIPPED, engine_library

log = logging.getLogger("nearlinear_collectives")

ABI_VERSION = 4
PEER_INFO_BYTES = 512
OWN_TIMEOUT = -1
ANY_RANK = -1

OK, BAD_ARGUMENT, PEER_DIED, TIMEOUT, MISMATCH, ABORTED, SYSTEM = range(7)
OPERATIONS = (
    *("all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", "all_to_all", "gather"),
    *("scatter", "reduce", "all_gather_uneven", "reduce_scatter_uneven", "send", "receive"),
)
KINDS = range(1, 1 + len(OPERATIONS))
(ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, BARRIER, ALL_TO_ALL, GATHER, SCATTER, REDUCE,
 ALL_GATHER_UNEVEN, REDUCE_SCATTER_UNEVEN, SEND, RECEIVE) = KINDS  # fmt: skip
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
          "bool")  # fmt: skip
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


class Options(ctypes.Structure):
    _fields_ = [
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("timeout_ms", ctypes.c_int64),
        ("name", ctypes.c_char_p),
        ("global_ranks", ctypes.POINTER(ctypes.c_int64)),
    ]


class Part(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("count", ctypes.c_uint64)]


class Call(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("reduce", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("count", ctypes.c_uint64),
        ("scale", ctypes.c_double),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("outputs", ctypes.POINTER(ctypes.c_void_p)),
        ("sends", ctypes.POINTER(Part)),
        ("receives", ctypes.POINTER(Part)),
        ("timeout_ms", ctypes.c_int64),
        ("tag", ctypes.c_int64),
    ]


Done = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p)


@functools.cache
def library() -> ctypes.CDLL:
    """Load the engine with global symbols, which the glue resolves against."""
    engine = load_engine()
    group, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    transfer = ctypes.c_void_p
    signatures = {
        "nlc_abi_version": ([], ctypes.c_int32),
        "nlc_error": ([], text),
        "nlc_group_open": ([ctypes.POINTER(Options), text, ctypes.POINTER(group)], ctypes.c_int32),
        "nlc_group_connect": ([group, text, ctypes.c_int64], ctypes.c_int32),
        "nlc_group_abort": ([group, text], None),
        "nlc_group_close": ([group], None),
        "nlc_group_set_timeout": ([group, ctypes.c_int64], None),
        "nlc_peer_is_dead": ([text], ctypes.c_int32),
        "nlc_run": ([group, ctypes.POINTER(Call)], ctypes.c_int32),
        "nlc_start": ([group, ctypes.POINTER(Call), Done, ctypes.c_void_p], ctypes.c_int32),
        "nlc_post": (
            [group, ctypes.POINTER(Call), Done, ctypes.c_void_p, ctypes.POINTER(transfer)],
            ctypes.c_int32,
        ),
        "nlc_transfer_wait": ([transfer, ctypes.c_int64], ctypes.c_int32),
        "nlc_transfer_rank": ([transfer], ctypes.c_int32),
        "nlc_transfer_free": ([transfer], None),
        "nlc_pool_allocate": ([size], ctypes.c_void_p),
        "nlc_pool_free": ([ctypes.c_void_p], None),
        "nlc_shared_allocate": ([group, size], ctypes.c_void_p),
        "nlc_shared_free": ([ctypes.c_void_p], None),
        "nlc_describe": ([group, text, size], size),
        "nlc_trace": ([text, size], size),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(engine, name)
        function.argtypes, function.restype = arguments, result
    if engine.nlc_abi_version() != ABI_VERSION:
        raise ImportError(
            f"the engine's library has ABI version {engine.nlc_abi_version()}, but this "
            f"nearlinear_collectives needs {ABI_VERSION}: reinstall the package"
        )
    return engine


def load_engine() -> ctypes.CDLL:
    """Load the shipped library, or compile one if the shipped one does not load here."""
    path = engine_library()
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if path != SHIPPED:
            raise ImportError(
                f"the engine's library cannot be loaded: {error}. If that file system is mounted "
                "noexec, set NEARLINEAR_COLLECTIVES_CACHE to a folder on another one"
            ) from error
        # For example built on a machine with a newer C library.
        log.warning(
            "the installed engine library cannot be loaded (%s): compiling it here, once", error
        )
        return ctypes.CDLL(str(engine_library(shipped=False)), mode=ctypes.RTLD_GLOBAL)


def read_json(function: Callable[..., int], *arguments: Any) -> Any:
    """Call an engine function that fills a buffer with JSON, and parse it."""
    capacity = 1 << 16
    while True:
        buffer = ctypes.create_string_buffer(capacity)
        length = function(*arguments, buffer, capacity)
        if length < capacity:
            return json.loads(buffer.value)
        capacity = length + 4096


def trace() -> list[dict]:
    """Return the last operations of this process in all its groups, oldest first.

    Returns:
        One dict per operation with the keys ``group``, ``sequence``, ``operation``, ``count``,
        ``bytes`` (per rank for all_gather and reduce_scatter), ``dtype``, ``reduce``, ``root`` (of
        a message the other rank; -1: none, or any), ``state`` (``running``, ``done`` or
        ``failed``), ``detail`` (data path, or the error), ``microseconds`` (duration so far) and
        ``microseconds_ago`` (time since its start).
    """
    return read_json(library().nlc_trace)
