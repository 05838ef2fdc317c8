"""Self-check of a run: refuse a layout whose small twin does not equal one process.

No list of supported models keeps up with transformers. Before the first step a twin of the model
with few layers and small widths runs one batch through the layout of the run, on its ranks. Results
are cached by the code of the model and of nearlinear, config, layout and versions.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import inspect
import json
import logging
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import __version__
from ...checkpoint.hf.meta_model import config_dict, import_transformers
from ...config.train import TrainConfig
from ...data.cache import cache_folder, write_cached
from ...distributed import runtime as runtimes
from ...distributed.consensus import all_gather_json
from ...errors import ConfigError, NearlinearError
from ...spmd import preserve_generators
from .compare import compare, twin_size
from .probe import kinds_of
from .twin import build_twin, twin_config

log = logging.getLogger(__name__)

TESTED_FAMILIES = frozenset({"gpt2", "gpt_neox", "llama", "mistral", "mixtral"})
"""Families whose layouts are compared with one process by the test suite."""

FOLDER = "self_check"
"""Folder of the results in the cache folder."""

PACKAGE = Path(__file__).resolve().parents[2]


def check_model(model: Any, config: TrainConfig) -> None:
    """Check the layout of ``config`` with a twin of ``model``. A collective call after `nl.init`.

    ``model`` may be on the meta device; its class and config are used. ``train.self_check`` says
    when: always, never, or ("auto") for families without tests of their own.

    Raises ConfigError, with the name of the first module and tensor that differ. A twin that cannot
    be built or divided is an error for "always", and a logged warning for "auto".
    """
    mode, family = config.train.self_check, model.config.model_type
    if mode == "off" or (mode == "auto" and family in TESTED_FAMILIES):
        return
    kinds = ("plain", "packed") if config.data.document_mask else ("plain",)
    now = runtimes.current()
    path, known = None, None
    if now.rank == 0:
        path = cache_folder(config.data.cache or None) / FOLDER / _file_name(model, config, kinds)
        known = _read(path)
    known = all_gather_json(known)[0]
    if known is None:
        start = time.perf_counter()
        try:
            different = _differences(model, config, kinds)
        except NearlinearError as error:  # the model itself may still be supported
            if mode == "always":
                raise
            if now.rank == 0:
                log.warning("%s is trained without a self-check: %s", type(model).__name__, error)
            return
        known = {"difference": different, "seconds": round(time.perf_counter() - start, 1)}
        if path is not None:
            _write(path, known | {"model": type(model).__name__, "kinds": list(kinds)})
            if not different:
                log.info("self-check: a small twin equals one process (%s s)", known["seconds"])
    if known["difference"]:
        raise ConfigError(
            f"self-check: {type(model).__name__} in this layout does not train as in one process: "
            f"{known['difference']}. Use another layout (nearlinear check tries one in seconds), "
            'or set train.self_check = "off" to train all the same.'
        )


def check_layout(
    rank: int, kind: type[nn.Module], full: Any, config: TrainConfig
) -> dict[str, str]:
    """Compare every kind of batch on this rank; the command ``nearlinear check``.

    Args:
        rank: This rank, as passed by `nearlinear.spmd.run`.
        kind: Class of the model.
        full: Config of the model.
        config: Layout, and activation checkpointing.

    Returns the difference of each kind of batch, or "".
    """
    runtimes.init(config.parallel)
    twin = twin_config(full, twin_size(config))
    kinds = kinds_of(build_twin(kind, twin))
    found = compare(kind, twin, config, kinds)
    return {name: "" if each is None else str(each) for name, each in found.items()}


def _differences(model: Any, config: TrainConfig, kinds: tuple[str, ...]) -> str:
    """Return the first difference of the twin of ``model``, or "". A collective call."""
    twin = twin_config(model.config, twin_size(config))
    deferred = not config.model.init_from  # as the run builds its model
    with preserve_generators():  # the random numbers of the run stay as they are
        found = compare(type(model), twin, config, kinds, deferred)
    gc.collect()  # transformed modules are reference cycles
    return next((str(each) for each in found.values() if each is not None), "")


def _file_name(model: Any, config: TrainConfig, kinds: tuple[str, ...]) -> str:
    """Return a file name with the hash of everything that determines the result of a check."""
    kind, now = type(model), runtimes.current()
    described = {
        "code": [_digest(source) for each in kind.__mro__ if (source := _source(each))],
        "nearlinear": [__version__, _own_digest()],
        "versions": [torch.__version__, import_transformers().__version__],
        "model": [kind.__qualname__, config_dict(model)],
        "layout": [dataclasses.asdict(config.parallel), dataclasses.asdict(config.moe)],
        "activations": dataclasses.asdict(config.activations),
        "loaded": bool(config.model.init_from),
        "kinds": kinds,
        "ranks": [now.mesh.world, now.mesh.ranks_per_node, now.device.type],
    }
    text = json.dumps(described, sort_keys=True, default=str)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.json"


def _source(kind: type) -> Path | None:
    """Return the file of a class that belongs neither to Python nor to torch."""
    if kind.__module__.partition(".")[0] in ("builtins", "torch", "typing", "abc"):
        return None
    try:
        return Path(inspect.getsourcefile(kind) or "")
    except (OSError, TypeError):  # a class from a notebook or without a file
        return None


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return str(path)


@cache
def _own_digest() -> str:
    """Return the hash of nearlinear's own code, for installations that are edited in place."""
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"difference": str(found["difference"]), "seconds": float(found["seconds"])}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%s): the self-check is repeated", path, error)
        return None


def _write(path: Path, result: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_cached(path, json.dumps(result).encode(), durable=False)
    except (OSError, NearlinearError) as error:
        log.warning("the result of the self-check is not cached: %s", error)
