"""``nearlinear new``: write the config of a run, and print the commands from text to a model."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import architecture, schema
from ..config import train as train_config
from ..config.architecture import PRESETS
from ..errors import CheckpointError, ConfigError, DataError

EXAMPLES = """\
examples:
  nearlinear new my-run                                       asks; without a terminal: defaults
  nearlinear new my-run --data texts/ --model gpt2-small      a folder of .txt or .md files
  nearlinear new my-run --data HuggingFaceFW/fineweb-edu --model llama2-7b --machines 4 --ranks 8
  nearlinear new my-run --data texts/ --model models/my-model      start from a trained model
  nearlinear new my-run --data dialogs.jsonl --model org/chat-model --lora 8
"""
CONFIG = "run.toml"
TOKENS = "tokens"
FEW_FILES = 100
"""Files below which a paragraph is a document, so that some text can be held out."""
LONGEST_SEQUENCE = 1024
HELD_OUT = 0.05
BYTES_PER_TOKEN = 5


def add_new(commands: argparse._SubParsersAction) -> None:
    """Add ``new`` to the subcommands of ``nearlinear``."""
    new = commands.add_parser(
        "new",
        help="write the config of a new run and print the next commands",
        description="Write FOLDER/run.toml for some text and a model, and print the commands that "
        "prepare the data, train, and use the model. Asks for missing values on a terminal.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    new.add_argument("folder", metavar="FOLDER", help="folder of the run")
    new.add_argument(
        "--data",
        metavar="SOURCE",
        help="folder or file of text (.txt, .md, .jsonl, .parquet), JSON lines of conversations, a "
        "dataset of the Hugging Face Hub, token shards, or botocore (default)",
    )
    new.add_argument(
        "--model",
        metavar="NAME",
        help=f"preset ({', '.join(PRESETS)}), or a folder or name of a Hugging Face model to start "
        "from (default: gpt2-tiny)",
    )
    new.add_argument("--machines", type=int, metavar="N", help="number of machines (default: 1)")
    new.add_argument(
        "--ranks", type=int, metavar="N", help="ranks per machine (default: one per GPU, or one)"
    )
    new.add_argument("--steps", type=int, default=200, metavar="N", help="optimizer steps (200)")
    new.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters only")
    new.add_argument("--overwrite", action="store_true", help="replace an existing run.toml")
    new.set_defaults(run=_new)


def _new(options: argparse.Namespace, arguments: list[str]) -> int:
    if sys.stdin.isatty():
        ask_missing(options, input)
    folder = Path(options.folder)
    path = folder / CONFIG
    if path.exists() and not options.overwrite:
        raise ConfigError(
            f"{path} exists: train with it (nearlinear train {path}), name another folder, or "
            "pass --overwrite"
        )
    plan = make_plan(options)
    train_config.load(plan.config)  # raises ConfigError
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(plan.toml(path), encoding="utf-8")
    print(f"{path} is written. Next:\n")
    for command in plan.commands(path):
        print(f"  {command}")
    return 0


def ask_missing(options: argparse.Namespace, ask: Callable[[str], str]) -> None:
    """Ask for the options that are not given; an empty answer is the default."""
    for name, question, convert in (
        ("data", "Text (folder, file, dataset of the Hugging Face Hub) [botocore]: ", str),
        ("model", "Model (preset, or Hugging Face folder or name) [gpt2-tiny]: ", str),
        ("machines", "Machines [1]: ", int),
        ("ranks", "Ranks per machine [one per GPU]: ", int),
    ):
        if getattr(options, name) is None and (answer := ask(question).strip()):
            try:
                setattr(options, name, convert(answer))
            except ValueError:
                raise ConfigError(f"--{name}: {answer!r} is not a whole number") from None


@dataclass
class RunPlan:
    """A config as tables of changed keys, and the commands around it."""

    config: dict[str, dict[str, Any]]
    machines: int = 1
    prepare: list[str] = field(default_factory=list)
    """Command that prepares the data; empty if there are token shards."""
    chats: bool = False

    def toml(self, path: Path) -> str:
        """Return the content of the config file."""
        lines = [
            "# Written by nearlinear new. Every key, its value and its meaning:",
            f"#   nearlinear train {path} --print-config",
        ]
        for table, keys in self.config.items():
            lines += ["", f"[{table}]", *schema.pairs(keys, bare=True)]
        return "\n".join(lines) + "\n"

    def commands(self, path: Path) -> list[str]:
        """Return the next commands, in order."""
        ranks, folder = self.config["run"].get("nproc"), path.parent
        train = ["nearlinear", "train", str(path)]
        if self.machines > 1:
            train = [
                "torchrun", f"--nnodes={self.machines}", f"--nproc-per-node={ranks or 'gpu'}",
                "--rdzv-backend=c10d", "--rdzv-endpoint=FIRST_MACHINE:29400",
                "-m", "nearlinear.cli", "train", str(path),
            ]  # fmt: skip
        talk = ["nearlinear", "chat" if self.chats else "generate", str(folder)]
        export = ["nearlinear", "export", str(folder), str(folder / "hf")]
        return [shlex.join(each) for each in (self.prepare, train, talk, export) if each]


def make_plan(options: argparse.Namespace) -> RunPlan:
    """Return the config and the commands for the options of ``nearlinear new``.

    Raises ConfigError or DataError if there is no such data or model.
    """
    from ..data.format import Manifest

    folder, source = Path(options.folder), options.data or "botocore"
    name = options.model or "gpt2-tiny"
    machines = 1 if options.machines is None else options.machines
    if machines < 1:
        raise ConfigError(f"--machines {machines}: must be at least 1")
    starts_from = "" if name in PRESETS else _model_name(name)
    model: dict[str, Any] = {"init_from": starts_from} if starts_from else {"preset": name}
    kind, size, files = _inspect(source)
    tokens = Path(source) if kind == TOKENS else folder / TOKENS
    pairs = kind == "preference"
    chats = kind in ("chat", "preference")
    prepare: list[str] = []
    if kind != TOKENS:
        prepare = ["nearlinear", "data", kind, *([] if kind == "botocore" else [source])]
        prepare += ["--out", str(tokens), "--val-fraction", str(HELD_OUT)]
        prepare += ["--tokenizer", starts_from] if starts_from else []
        prepare += ["--document", "paragraph"] if kind == "text" and files < FEW_FILES else []
    else:
        prepared = Manifest.read(tokens)
        chats, pairs = prepared.marks_targets, prepared.pairs
    length = _sequence_length(name, starts_from, size)
    data: dict[str, Any] = {"path": str(tokens), "sequence_length": length}
    if chats:
        data |= {"packing": "best_fit", "document_mask": True}
    optimizer: dict[str, Any] = {"warmup_steps": max(1, options.steps // 10)}
    if starts_from:
        full, adapters = (1e-6, 1e-5) if pairs else (2e-5, 2e-4)
        optimizer["lr"] = adapters if options.lora else full
    run: dict[str, Any] = {"folder": str(folder)}
    if options.ranks is not None:
        run["nproc"] = options.ranks
    config = {
        "model": model,
        **({"lora": {"rank": options.lora}} if options.lora else {}),
        "data": data,
        "batch": {"micro_batch_size": 1 if starts_from else 8},
        "optimizer": optimizer,
        "train": {"steps": options.steps},
        "run": run,
    }
    return RunPlan(config, machines, prepare, chats)


def _model_name(name: str) -> str:
    """Return ``name`` if it can be a Hugging Face model. Raises ConfigError."""
    if Path(name).is_dir():
        architecture.check_weights(name)
        architecture.read_architecture(name)
        return name
    if "/" not in name or not architecture.HUB_NAME.fullmatch(name):
        error = schema.unknown_key(name, "--model", PRESETS)
        raise ConfigError(
            f"{str(error).replace('unknown key', 'unknown preset')}. A trained model is a folder "
            "with config.json, or a name of the Hugging Face Hub, as in org/model"
        )
    return name


def _inspect(source: str) -> tuple[str, int | None, int]:
    """Return the command of `nearlinear data` for ``source``, its bytes if known, and its files.

    The command is "tokens" for token shards.
    """
    from ..data.format.manifest import MANIFEST_FILE, text_source

    path = Path(source)
    if source == "botocore":
        return "botocore", None, 1
    if (path / MANIFEST_FILE).is_file():
        return TOKENS, None, 1
    if path.exists():
        kind = text_source(path)
        if not kind:
            raise DataError(
                f"--data {source} holds no text: no .txt, .md, .jsonl or .parquet files"
            )
        files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        packed = any(each.suffix in (".gz", ".zst", ".parquet") for each in files)
        size = None if packed else sum(each.stat().st_size for each in files)
        return kind, size, len(files)
    if "/" in source and architecture.HUB_NAME.fullmatch(source) and not path.parent.is_dir():
        return "hf", None, 1
    raise DataError(
        f"--data {source}: no such file or folder, and not the name of a dataset as in org/dataset"
    )


def _sequence_length(name: str, starts_from: str, size: int | None) -> int:
    """Return tokens per sequence: the model's context, at most as long as the text allows."""
    longest = LONGEST_SEQUENCE
    if not starts_from:
        longest = PRESETS[name]["context"]
    else:
        try:
            found = architecture.model_folder(starts_from, download=False)
            longest = min(longest, architecture.read_architecture(str(found))["context"])
        except (CheckpointError, ConfigError):  # not downloaded yet
            pass
    if size is not None:
        while longest > 32 and size / BYTES_PER_TOKEN < 16 * longest:
            longest //= 2
    return longest
