"""``nearlinear checkpoint``: inspect, verify, compare, and export checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..storage import StoragePath
    from .index_schema import Index

INSPECT_EXAMPLES = """\
examples:
  nearlinear checkpoint inspect runs/gpt2/checkpoints            all checkpoints of a run
  nearlinear checkpoint inspect runs/gpt2/checkpoints/step-00000500 --json
  nearlinear checkpoint inspect s3://bucket/gpt2/checkpoints     all checkpoints in a bucket
"""
VERIFY_EXAMPLES = """\
examples:
  nearlinear checkpoint verify runs/gpt2/checkpoints             all checkpoints of a run
  nearlinear checkpoint verify step-00000400 step-00000500 && rsync -a ...
"""
SIGN_EXAMPLES = """\
examples:
  openssl rand -hex 32 > key && chmod 600 key
  NEARLINEAR_CHECKPOINT_KEY_FILE=key nearlinear checkpoint sign runs/gpt2/checkpoints
"""
DIFF_EXAMPLES = """\
examples:
  nearlinear checkpoint diff before/step-00000500 after/step-00000500
  nearlinear checkpoint diff A B --only model/ --atol 1e-6       only the model, with a tolerance
"""
EXPORT_EXAMPLES = """\
examples:
  nearlinear checkpoint export runs/gpt2 gpt2-hf                 the newest checkpoint of a run
  nearlinear checkpoint export runs/gpt2/checkpoints/step-00000500 gpt2-hf
  nearlinear checkpoint export step-00000500 gpt2-hf --dtype bfloat16 --tokenizer tokens/tokenizer
  nearlinear checkpoint export step-00000500 gpt2-hf --config run.toml
  python -c "from transformers import pipeline as p; print(p('text-generation', 'gpt2-hf')('The'))"
"""
FOLDERS = "a checkpoint, a folder of several, or a run folder, also s3://bucket/prefix"
MAX_SHOWN = 20  # differences printed without --all

RowsOf = Callable[[str], int]
DescribeModel = Callable[[Path, RowsOf], tuple[dict, Path | None]]


def add_commands(commands, describe_model: DescribeModel) -> None:
    """Add the subcommands to the argument parser of ``nearlinear``.

    Args:
        commands: Result of ``add_subparsers`` of the main parser.
        describe_model: Called as ``describe_model(path, rows)`` with the path of a training config.
            Returns the config.json of its model, and the folder of its tokenizer or None.
            ``rows(name)`` is the number of rows of a saved tensor. It is passed in, because it
            needs packages above this one.
    """
    parser = commands.add_parser(
        "checkpoint",
        help="inspect, verify, compare and export checkpoints, without a cluster",
        description="Inspect, verify, compare and export checkpoints on this machine, tensor by "
        "tensor. Needs no cluster and no accelerator, and memory for only one tensor.",
    )
    parser.set_defaults(described=describe_model)
    actions = parser.add_subparsers(title="actions", metavar="action", required=True)
    for name, add, run, examples, summary, description in (
        ("inspect", _add_inspect, _inspect, INSPECT_EXAMPLES,
         "print step, layout, tensors and sizes of a checkpoint", ""),
        ("verify", _add_verify, _verify, VERIFY_EXAMPLES,
         "check that a checkpoint is complete and unchanged", "Check the size and SHA-256 of every "
         "file, and its tensors against the index. Prints a line for each fault; the exit code is "
         "1 if there is one."),
        ("sign", _add_sign, _sign, SIGN_EXAMPLES, "sign checkpoints with a secret key",
         "Verify checkpoints, and write the signature of each index (HMAC-SHA256) beside it. The "
         "key is in the environment: NEARLINEAR_CHECKPOINT_KEY, or the path of a file in "
         "NEARLINEAR_CHECKPOINT_KEY_FILE. While it is set, new checkpoints are signed, and others "
         "are not loaded."),
        ("diff", _add_diff, _diff, DIFF_EXAMPLES, "compare the tensors of two checkpoints",
         "Compare two checkpoints of any layouts, largest differences first. Prints the largest "
         "absolute difference of each tensor, and the norm of the difference relative to the "
         "tensor's. The exit code is 1 if they differ."),
        ("export", _add_export, _export, EXPORT_EXAMPLES,
         "write a model for transformers' from_pretrained", "Write the model of a checkpoint as a "
         "Hugging Face folder: safetensors files, config.json, and the tokenizer."),
    ):  # fmt: skip
        action = _add_command(actions, name, add, run, examples, summary, description)
        action.add_argument("--debug", action="store_true", default=argparse.SUPPRESS,
            help="show tracebacks of errors")  # fmt: skip
    shorter = EXPORT_EXAMPLES.replace("nearlinear checkpoint export", "nearlinear export")
    short = _add_command(
        commands, "export", _add_export, _export, shorter,
        "write the model of a run for transformers (checkpoint export)", "Write the model of a run "
        "or checkpoint as a Hugging Face folder: safetensors files, config.json, the tokenizer.",
    )  # fmt: skip
    short.set_defaults(described=describe_model)


def _add_command(
    commands, name: str, add: Callable, run: Callable, examples: str, summary: str, description: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=description or None,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add(command.add_argument)
    command.set_defaults(run=run)
    return command


def _add_inspect(add) -> None:
    add("folders", nargs="+", metavar="FOLDER", help=FOLDERS)
    add("--json", action="store_true", help="print JSON, one line per checkpoint")


def _add_verify(add) -> None:
    add("folders", nargs="+", metavar="FOLDER", help=FOLDERS)


def _add_sign(add) -> None:
    add("folders", nargs="+", metavar="FOLDER", help=FOLDERS)


def _add_diff(add) -> None:
    add("one", metavar="A", help="a checkpoint")
    add("other", metavar="B", help="the checkpoint to compare with")
    add("--atol", type=float, default=0.0, metavar="X", help="absolute tolerance (default: 0)")
    add("--rtol", type=float, default=0.0, metavar="X",
        help="tolerance relative to the values of A (default: 0)")  # fmt: skip
    add("--only", default="", metavar="PREFIX", help="compare only names with this prefix, as in "
        "model/")  # fmt: skip
    add("--all", action="store_true", help=f"print more than {MAX_SHOWN} differences")


def _add_export(add) -> None:
    add("folder", metavar="FOLDER", help="a run, a folder of checkpoints, or a checkpoint")
    add("out", metavar="OUT", help="the folder to write")
    add("--format", choices=["hf"], default="hf", help="hf: Hugging Face folder (default)")
    add("--config", default="", metavar="FILE", help="config of the model: config.toml of a run, "
        "or config.json (default: stored in the checkpoint, or config.toml beside it)"
        )  # fmt: skip
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="",
        help="dtype of the tensors (default: as saved)")  # fmt: skip
    add("--tokenizer", default="", metavar="FOLDER", help="folder with tokenizer.json, or none "
        "(default: the tokenizer beside the checkpoints)")  # fmt: skip
    add("--max-shard-bytes", type=int, default=0, metavar="N",
        help="size limit of a file in bytes (default: 5 GB)")  # fmt: skip
    add("--adapter", action="store_true", help="write the adapters of LoRA alone, for peft "
        "(default: merged into the weights)")  # fmt: skip
    add("--overwrite", action="store_true", help="replace an existing model in OUT")


def _inspect(options: argparse.Namespace, arguments) -> int:
    from . import index, metadata

    for folder in (each for name in options.folders for each in metadata.find_checkpoints(name)):
        summary = metadata.summarize(folder, index.read(folder))
        print(json.dumps(summary) if options.json else metadata.format_summary(summary))
    return 0


def _verify(options: argparse.Namespace, arguments) -> int:
    from . import index, metadata, verify

    folders = [each for name in options.folders for each in metadata.find_checkpoints(name)]
    sizes = {}
    for folder in folders:
        with contextlib.suppress(ValueError):  # reported below
            found = index.read(folder)
            sizes[folder] = found, sum(file.bytes for file in found.files.values())
    faulty = 0
    with _progress_bar("verifying", sum(size for _, size in sizes.values())) as advance:
        for folder in folders:
            faults = list(verify.find_faults(folder, advance))
            faulty += bool(faults)
            for fault in faults:
                print(f"FAULT {fault}")
            if not faults:
                found, size = sizes[folder]
                print(f"ok    {folder}: step {found.step}, {len(found.files)} files, "
                      f"{metadata.format_bytes(size)}")  # fmt: skip
                if missing := index.missing_protections(found):
                    print(f"note  {folder} is not fully protected: {missing}")
    if faulty:
        print(f"{faulty} of {len(folders)} checkpoints are damaged: delete them, and resume from "
              "another one")  # fmt: skip
    return 1 if faulty else 0


def _sign(options: argparse.Namespace, arguments) -> int:
    from . import index, metadata, verify

    folders = [each for name in options.folders for each in metadata.find_checkpoints(name)]
    for folder in folders:
        for fault in verify.find_faults(folder, signed=False):
            raise CheckpointError(f"{fault}; it is not signed")
        index.sign(folder)
        print(f"signed {folder}")
    return 0


def _diff(options: argparse.Namespace, arguments) -> int:
    from .verify import compare_checkpoints

    done = 0

    def on_progress(compared: int, total: int) -> None:
        nonlocal done
        advance((compared - done) / total)
        done = compared

    with _progress_bar("comparing", 1) as advance:
        found = compare_checkpoints(
            options.one, options.other, options.atol, options.rtol, options.only, on_progress
        )
    for each in found if options.all else found[:MAX_SHOWN]:
        print(each)
    if not found:
        print("no difference")
    elif len(found) > MAX_SHOWN and not options.all:
        print(f"and {len(found) - MAX_SHOWN} more: --all shows them")
    return 1 if found else 0


def _export(options: argparse.Namespace, arguments) -> int:
    import torch

    from . import index, metadata
    from .hf.export import export_adapter, export_checkpoint
    from .hf.writer import MAX_SHARD_BYTES, tokenizer_beside

    folder = metadata.find_checkpoints(options.folder)[-1]
    model, tokenizer = _find_model_config(folder, index.read(folder), options)
    if options.tokenizer:
        tokenizer = None if options.tokenizer == "none" else Path(options.tokenizer)
    else:
        tokenizer = tokenizer_beside(folder) or tokenizer
    if options.adapter:
        export_adapter(folder, options.out, tokenizer=tokenizer, overwrite=options.overwrite)
        print(f"{options.out}: the adapters of {folder.name}, for peft.PeftModel.from_pretrained")
        return 0
    written = export_checkpoint(
        folder,
        options.out,
        model,
        dtype=getattr(torch, options.dtype) if options.dtype else None,
        max_shard_bytes=options.max_shard_bytes or MAX_SHARD_BYTES,
        tokenizer=tokenizer,
        overwrite=options.overwrite,
    )
    print(f"{written}: {model['architectures'][0] if 'architectures' in model else 'the model'} "
          f"of {folder.name}, for AutoModelForCausalLM.from_pretrained")  # fmt: skip
    if tokenizer is None:
        print("no tokenizer was written: --tokenizer FOLDER adds one")
    return 0


def _find_model_config(
    folder: StoragePath, found: Index, options: argparse.Namespace
) -> tuple[dict, Path | None]:
    """Return the config.json of a checkpoint's model, and the folder of its tokenizer or None."""
    from . import metadata

    here = folder.path
    parents = (here, *here.resolve().parents[:2]) if here else ()  # RUN/checkpoints/step-...
    beside = [up / "config.toml" for up in parents if (up / "config.toml").is_file()]
    path = Path(options.config) if options.config else next(iter(beside), None)
    if path is not None and path.suffix == ".json":
        content = _read_json(path)
        if "model_type" in content:
            return content, None
    stored = None if options.config else metadata.model_config(found)
    if path is None:
        if stored is None:
            raise CheckpointError(
                f"{folder} does not contain the config of its model, and there is no config.toml "
                "beside it: pass --config RUN/config.toml"
            )
        return stored, None

    def rows(name: str) -> int:
        tensor = found.tensors.get(f"model/{name}")
        if tensor is None:
            raise CheckpointError(
                f"{folder} has no tensor {name}, which the model of {path} has: pass the config of "
                "the run that saved it as --config"
            )
        return tensor.shape[0]

    model, tokenizer = options.described(path, rows)
    return stored or model, tokenizer


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"--config {path} cannot be read ({error}): pass a config.toml or config.json"
        ) from None
    return content if isinstance(content, dict) else {}


@contextlib.contextmanager
def _progress_bar(label: str, total: float) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on a terminal; yield a function that advances it by an amount."""
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task(label, total=total)
        yield lambda amount: progress.advance(task, amount)
