"""The engine's C interface as seen from Python: one ctypes declaration per function."""

from __future__ import annotations

import ctypes
import functools
import json
import logging

from nearlinear_collectives.build import SHIPPED, engine_library

log = logging.getLogger("nearlinear_collectives")

ABI_VERSION = 1
CARD_BYTES = 512
OWN_TIMEOUT = -1

OK, BAD_ARGUMENT, PEER_DIED, TIMEOUT, MISMATCH, ABORTED, SYSTEM = range(7)
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, BARRIER = range(1, 6)
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
        ("timeout_ms", ctypes.c_int64),
    ]


Done = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p)


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded engine. Its symbols are global, for the glue links against nothing else."""
    engine = load()
    card = ctypes.c_char_p
    group, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    signatures = {
        "nlc_abi_version": ([], ctypes.c_int32),
        "nlc_error": ([], text),
        "nlc_group_open": ([ctypes.POINTER(Options), card, ctypes.POINTER(group)], ctypes.c_int32),
        "nlc_group_connect": ([group, card, ctypes.c_int64], ctypes.c_int32),
        "nlc_group_abort": ([group, text], None),
        "nlc_group_close": ([group], None),
        "nlc_group_set_timeout": ([group, ctypes.c_int64], None),
        "nlc_card_is_dead": ([card], ctypes.c_int32),
        "nlc_run": ([group, ctypes.POINTER(Call)], ctypes.c_int32),
        "nlc_start": ([group, ctypes.POINTER(Call), Done, ctypes.c_void_p], ctypes.c_int32),
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
            "the engine's library belongs to another version of nearlinear_collectives: "
            "reinstall the package"
        )
    return engine


def load() -> ctypes.CDLL:
    path = engine_library()
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if path != SHIPPED:
            raise ImportError(
                f"the engine's library cannot be loaded: {error}. If that file system does not "
                "allow programs, name a folder on another one in NEARLINEAR_COLLECTIVES_CACHE"
            ) from error
        # Made on a machine with a newer C library, say: one made here fits.
        log.warning(
            "the engine's library of this installation cannot be loaded (%s): compiling it "
            "here, once",
            error,
        )
        return ctypes.CDLL(str(engine_library(shipped=False)), mode=ctypes.RTLD_GLOBAL)


def read_json(function, *arguments):
    """Call an engine function that fills a buffer with JSON."""
    capacity = 1 << 16
    while True:
        buffer = ctypes.create_string_buffer(capacity)
        length = function(*arguments, buffer, capacity)
        if length < capacity:
            return json.loads(buffer.value)
        capacity = length + 4096


def trace() -> list[dict]:
    """The last operations of this process over all its groups, oldest first.

    Each is a dict of group, sequence, operation, count, bytes (per rank for all_gather and
    reduce_scatter), dtype, reduce, state (``running``, ``done``, ``failed``), detail (how the bytes
    moved, or why it failed), microseconds it took (so far) and microseconds_ago it began.
    """
    return read_json(library().nlc_trace)
