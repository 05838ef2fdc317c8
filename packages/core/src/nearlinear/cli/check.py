"""``nearlinear check``: compare a small twin of a model in a layout with one process."""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config.train import TrainConfig

EXAMPLES = """\
examples:
  nearlinear check llama-tiny --layout tp=2              a preset, two tensor ranks
  nearlinear check Qwen/Qwen3-8B --layout tp=2,cp=2      a model of the Hugging Face hub: its config
  nearlinear check models/mine --layout pp=2,shard=2     a folder with a config.json, or that file
  nearlinear check gpt2-tiny --layout tp=2 --ranks 8 --recompute selective --processes
"""

SHORT_NAMES = {
    "shard": "hybrid_shard_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
    "pp": "pipeline_parallel_degree",
}
"""Short names of `ParallelConfig` keys in ``--layout``."""

DIFFERENT = 1
"""Exit code of a layout that differs from one process."""


def add_check(commands: Any) -> None:
    """Add ``check`` to the subcommands of ``nearlinear``."""
    check = commands.add_parser(
        "check",
        help="compare a small twin of a model in a layout with one process",
        description="Build a twin of a model with few layers and small widths, run one batch of "
        "each kind (uneven labels, padding on the left and on the right, packed documents) through "
        "a layout on ranks of this machine, and compare the loss and every gradient with one "
        "process. No weights are read. Exit code 0: equal; 1: different; 2: refused.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = check.add_argument
    add("model", help="a preset, a config.json, a folder with one, or a name on the hub")
    add("--layout", default="", metavar="tp=2,cp=2",
        help="degrees: shard, tp, cp, ep, pp, or any key of [parallel]")  # fmt: skip
    add(
        "--ranks",
        type=int,
        default=0,
        metavar="N",
        help="ranks; default: as few as the degrees allow",
    )
    add("--recompute", default="", metavar="STRATEGY", help="activations.checkpoint, e.g. each")
    add("--processes", action="store_true", help="ranks as processes over gloo instead of threads")
    check.set_defaults(run=_check)


def parse_layout(text: str) -> dict[str, Any]:
    """Return the keys of `ParallelConfig` that ``--layout`` sets. Raises ConfigError."""
    from ..config import schema

    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not (equals and name and value):
            raise ConfigError(
                f"--layout {part}: expected name=value, such as tp=2; names are "
                f"{', '.join(SHORT_NAMES)} and the keys of [parallel]"
            )
        schema.assign(found, f"{SHORT_NAMES.get(name, name)}={value}")
    stages = found.get("pipeline_parallel_degree", 1)
    if isinstance(stages, int) and stages > 1:
        found.setdefault("microbatches", stages)
    return found


def find_config(name: str) -> tuple[type, Any]:
    """Return the class and the config of the model ``name``. Raises ConfigError."""
    from ..checkpoint.hf.meta_model import import_transformers
    from ..config.architecture import CONFIG_CLASSES, PRESETS

    transformers = import_transformers()
    if name in PRESETS:
        preset = PRESETS[name]
        config = getattr(transformers, CONFIG_CLASSES[preset["family"]])(**preset["shape"])
        return transformers.AutoModelForCausalLM._model_mapping[type(config)], config
    path = Path(name)
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(path.parent if path.name == "config.json" else name), trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name} is neither a preset ({', '.join(PRESETS)}) nor a folder, config.json or name "
            f"of a Hugging Face model: {' '.join(str(error).split())[:200]}"
        ) from None
    return _model_class(transformers, config), config


def _model_class(transformers: Any, config: Any) -> type:
    """Return the class that the config names, or the family's class with a loss."""
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for auto in ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification"):
        mapping = getattr(transformers, f"AutoModelFor{auto}")._model_mapping
        if type(config) in mapping:
            kind = mapping[type(config)]
            return kind[0] if isinstance(kind, tuple) else kind
    raise ConfigError(
        f"{type(config).__name__}: transformers {transformers.__version__} has no class with a "
        "loss for it; name one under architectures in config.json"
    )


def _check(options: argparse.Namespace, arguments: list[str]) -> int:
    from ..config import parallel
    from ..config.train import ActivationsConfig, TrainConfig

    config = TrainConfig(
        parallel=parallel.load(parse_layout(options.layout), {}),
        activations=ActivationsConfig(checkpoint=options.recompute),
    )
    ranks = options.ranks or _fewest_ranks(config)
    config.parallel.degrees(ranks)  # raises ConfigError

    from .. import spmd
    from ..errors import NearlinearError, RankError
    from ..train.self_check.check import check_layout

    kind, full = find_config(options.model)
    start = time.perf_counter()
    try:
        call = (kind, full, config)
        found = spmd.run(check_layout, ranks, args=call, processes=options.processes)[0]
    except RankError as error:
        if isinstance(error.__cause__, NearlinearError):
            raise error.__cause__ from None
        raise
    seconds = time.perf_counter() - start
    for name, result in found.items():
        print(f"{name:8} {result or 'equal'}")
    bad = sum(bool(result) for result in found.values())
    print(
        f"{kind.__name__} on {ranks} ranks: "
        + ("equals one process" if not bad else f"{bad} of {len(found)} kinds of batches differ")
        + f" ({seconds:.1f} s)"
    )
    return DIFFERENT if bad else 0


def _fewest_ranks(config: TrainConfig) -> int:
    """Return the smallest number of ranks that the degrees divide, at least 2."""
    keys = dataclasses.asdict(config.parallel)
    sharing = max(
        keys["hybrid_shard_degree"],
        keys["context_parallel_degree"],
        keys["expert_parallel_degree"],
    )
    return max(2, keys["pipeline_parallel_degree"] * keys["tensor_parallel_degree"] * sharing)
