"""``nearlinear checkpoint``: look at checkpoints, check them, compare them, hand them on."""

import argparse
import contextlib
import json
import sys
from pathlib import Path

INSPECT_EXAMPLES = """\
examples:
  nearlinear checkpoint inspect runs/gpt2/checkpoints            all of a run
  nearlinear checkpoint inspect runs/gpt2/checkpoints/step-00000500 --json
  nearlinear checkpoint inspect s3://bucket/gpt2/checkpoints     all of a run, in a bucket
"""
VERIFY_EXAMPLES = """\
examples:
  nearlinear checkpoint verify runs/gpt2/checkpoints             all of a run
  nearlinear checkpoint verify step-00000400 step-00000500 && rsync -a ...
"""
DIFF_EXAMPLES = """\
examples:
  nearlinear checkpoint diff before/step-00000500 after/step-00000500
  nearlinear checkpoint diff A B --only model/ --atol 1e-6       the model alone, not to the bit
"""
EXPORT_EXAMPLES = """\
examples:
  nearlinear checkpoint export runs/gpt2/checkpoints/step-00000500 gpt2-hf
  nearlinear checkpoint export step-00000500 gpt2-hf --dtype bfloat16 --tokenizer tokens/tokenizer
  nearlinear checkpoint export step-00000500 gpt2-hf --config run.toml
  python -c "from transformers import pipeline as p; print(p('text-generation', 'gpt2-hf')('The'))"
"""
FOLDERS = "a checkpoint, or a run's folder of several; s3://bucket/prefix, too"
SHOWN = 20  # differences, unless all are asked for


def add_commands(commands, described) -> None:
    """Add them to the parsers of ``nearlinear``.

    ``described(path, rows)``: the config.json of the model that a training config describes, and
    the folder of its tokenizer or None, where ``rows(name)`` is the length of a tensor that was
    saved; it is of a floor above.
    """
    parser = commands.add_parser(
        "checkpoint",
        help="inspect, verify, compare and export checkpoints, without a cluster",
        description="Look at checkpoints on this machine alone, tensor by tensor: no cluster, no "
        "accelerator, and never more memory than one tensor takes.",
    )
    parser.set_defaults(described=described)
    actions = parser.add_subparsers(title="actions", metavar="action", required=True)
    for name, add, run, examples, words, more in (
        ("inspect", _add_inspect, _inspect, INSPECT_EXAMPLES, "say what is in a checkpoint", ""),
        ("verify", _add_verify, _verify, VERIFY_EXAMPLES,
         "check that a checkpoint is what was written", "Check every file's size and SHA-256, and "
         "that its tensors are those of the index. Exit code 1, and a line for each fault, if "
         "something is wrong."),
        ("diff", _add_diff, _diff, DIFF_EXAMPLES, "say how two checkpoints differ",
         "Compare two checkpoints, saved at any layouts, most different tensors first: the largest "
         "difference, and the norm of all over the tensor's. Exit code 1 if they differ."),
        ("export", _add_export, _export, EXPORT_EXAMPLES,
         "write a model for transformers' from_pretrained", "Write the model of a checkpoint as a "
         "Hugging Face folder: safetensors, config.json, and the tokenizer that goes with it."),
    ):  # fmt: skip
        action = actions.add_parser(
            name,
            help=words,
            description=more or None,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add(action.add_argument)
        action.add_argument("--debug", action="store_true", default=argparse.SUPPRESS,
            help="show tracebacks of errors")  # fmt: skip
        action.set_defaults(run=run)


def _add_inspect(add) -> None:
    add("folders", nargs="+", metavar="FOLDER", help=FOLDERS)
    add("--json", action="store_true", help="as JSON, one line per checkpoint")


def _add_verify(add) -> None:
    add("folders", nargs="+", metavar="FOLDER", help=FOLDERS)


def _add_diff(add) -> None:
    add("one", metavar="A", help="a checkpoint")
    add("other", metavar="B", help="another one")
    add("--atol", type=float, default=0.0, metavar="X", help="differences that do not count (0)")
    add("--rtol", type=float, default=0.0, metavar="X", help="and this share of A's value (0)")
    add("--only", default="", metavar="PREFIX", help="names that begin so, as in model/")
    add("--all", action="store_true", help=f"show more than {SHOWN}")


def _add_export(add) -> None:
    add("folder", metavar="FOLDER", help="a checkpoint, or a run's folder: its newest one")
    add("out", metavar="OUT", help="the folder to write")
    add("--format", choices=["hf"], default="hf", help="hf: Hugging Face's (the default)")
    add("--config", default="", metavar="FILE", help="what the model is: a run's config.toml, or a "
        "config.json; default: what the checkpoint says, or config.toml beside it")  # fmt: skip
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="", help="default: as saved")
    add("--tokenizer", default="", metavar="FOLDER", help="with tokenizer.json; default: that of "
        "the run's data, if it is there; none: without")  # fmt: skip
    add("--max-shard-bytes", type=int, default=0, metavar="N", help="of a file (5 GB)")
    add("--overwrite", action="store_true", help="replace a model that is in OUT")


def _inspect(options, arguments) -> int:
    from . import index, summary

    for folder in (found for name in options.folders for found in summary.folders(name)):
        told = summary.summary(folder, index.read(folder))
        print(json.dumps(told) if options.json else summary.text(told))
    return 0


def _verify(options, arguments) -> int:
    from . import index, summary, verify

    folders = [found for name in options.folders for found in summary.folders(name)]
    sizes = {}
    for folder in folders:
        with contextlib.suppress(ValueError):  # it says so below
            told = index.read(folder)
            sizes[folder] = told, sum(file.bytes for file in told.files.values())
    wrong = 0
    with _bar("verifying", sum(size for _, size in sizes.values())) as advance:
        for folder in folders:
            found = list(verify.faults(folder, advance))
            wrong += bool(found)
            for fault in found:
                print(f"FAULT {fault}")
            if not found:
                told, size = sizes[folder]
                print(f"ok    {folder}: step {told.step}, {len(told.files)} files, "
                      f"{summary.in_units(size)}")  # fmt: skip
    if wrong:
        print(f"{wrong} of {len(folders)} checkpoints cannot be trusted: go on from another one, "
              "and delete these")  # fmt: skip
    return 1 if wrong else 0


def _diff(options, arguments) -> int:
    from .diff import differences

    done = 0

    def read(at: int, of: int) -> None:
        nonlocal done
        advance((at - done) / of)
        done = at

    with _bar("comparing", 1) as advance:
        found = differences(
            options.one, options.other, options.atol, options.rtol, options.only, read
        )
    for each in found if options.all else found[:SHOWN]:
        print(each)
    if not found:
        print("no difference")
    elif len(found) > SHOWN and not options.all:
        print(f"and {len(found) - SHOWN} more: --all shows them")
    return 1 if found else 0


def _export(options, arguments) -> int:
    import torch

    from . import about, index, summary
    from .hf.export import export_checkpoint
    from .hf.target import MAX_SHARD_BYTES

    folder = summary.folders(options.folder)[-1]
    model, tokenizer = _model(folder, index.read(folder), options, about)
    if options.tokenizer:
        tokenizer = None if options.tokenizer == "none" else Path(options.tokenizer)
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
        print("without a tokenizer: --tokenizer FOLDER adds one")
    return 0


def _model(folder, found, options, about):
    """The config.json of a checkpoint's model, and the folder of its tokenizer or None."""
    from ..errors import CheckpointError

    here = folder.path
    near = (here, *here.resolve().parents[:2]) if here else ()  # RUN/checkpoints/step-...
    beside = [up / "config.toml" for up in near if (up / "config.toml").is_file()]
    path = Path(options.config) if options.config else next(iter(beside), None)
    if path is not None and path.suffix == ".json" and "model_type" in (said := _json(path)):
        return said, None
    told = None if options.config else about.model_of(found)
    if path is None and told is None:
        raise CheckpointError(
            f"{folder} does not say what model it is of, and there is no config.toml beside it: "
            "name the run's with --config RUN/config.toml"
        )
    if path is None:
        return told, None

    def rows(name: str) -> int:
        tensor = found.tensors.get(f"model/{name}")
        if tensor is None:
            raise CheckpointError(
                f"{folder} has no {name}, and {path} describes a model that has: name the config "
                "of the run that saved it with --config"
            )
        return tensor.shape[0]

    model, tokenizer = options.described(path, rows)
    return told or model, tokenizer


def _json(path: Path) -> dict:
    from ..errors import CheckpointError

    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--config {path} cannot be read: {error}") from None
    return said if isinstance(said, dict) else {}


@contextlib.contextmanager
def _bar(what: str, total: float):
    """A progress bar on a terminal; what to call with how much more is done."""
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task(what, total=total)
        yield lambda amount: progress.advance(task, amount)
