"""``nearlinear generate`` and ``chat``: text from a run, a checkpoint, or a Hugging Face model.

transformers generates, in one process. The text is printed as it is made.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ConfigError

GENERATE_EXAMPLES = """\
examples:
  nearlinear generate my-run --prompt "Once upon a time"       the newest checkpoint of a run
  nearlinear generate gpt2-hf --prompt "The" --tokens 200 --temperature 0
  echo "Once upon a time" | nearlinear generate my-run/checkpoints/step-00000500
"""
CHAT_EXAMPLES = """\
examples:
  nearlinear chat my-run                                       type a message; Ctrl-D ends
  nearlinear chat my-run --system "Answer in one sentence."
  echo "Which number follows 3?" | nearlinear chat my-run      one answer per line
"""
MODEL = "run folder, checkpoint, exported folder, adapter of peft, or name on the Hugging Face Hub"


def add_commands(commands: argparse._SubParsersAction) -> None:
    """Add ``generate`` and ``chat`` to the subcommands of ``nearlinear``."""
    generate = commands.add_parser(
        "generate",
        help="continue a prompt with a trained model",
        description="Continue a prompt with the model of a run, a checkpoint, or a folder.",
        epilog=GENERATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(generate)
    generate.add_argument("--prompt", metavar="TEXT", help="text to continue (default: stdin)")
    generate.set_defaults(run=_generate)
    chat = commands.add_parser(
        "chat",
        help="talk to a model that was trained on conversations",
        description="Talk to a model whose tokenizer has a chat template. Each line is a message.",
        epilog=CHAT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(chat)
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.set_defaults(run=_chat)


def _add_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("--tokens", type=int, default=128, metavar="N", help="most new tokens (128)")
    add("--temperature", type=float, default=0.8, metavar="T",
        help="0: always the most likely token (default: 0.8)")  # fmt: skip
    add("--top-k", type=int, default=40, metavar="K", help="candidates per token (40)")
    add("--seed", type=int, default=0, help="seed of the sampling (0)")


def _generate(options: argparse.Namespace, arguments: list[str]) -> int:
    model, tokenizer = load_model(options.model)
    prompt = options.prompt
    if prompt is None:
        if sys.stdin.isatty():
            raise ConfigError('--prompt is missing: nearlinear generate MODEL --prompt "The"')
        prompt = sys.stdin.read().rstrip("\n")
    print(prompt, end="", flush=True)
    ids = tokenizer(prompt)["input_ids"] or [tokenizer.eos_token_id]
    stream(model, tokenizer, ids, options)
    return 0


def _chat(options: argparse.Namespace, arguments: list[str]) -> int:
    from ..checkpoint.hf.writer import turn_end

    model, tokenizer = load_model(options.model)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{options.model}: the tokenizer has no chat template, so that the model was not "
            "trained on conversations: use nearlinear generate, or train on conversations "
            "(nearlinear data chat)"
        )
    messages = [{"role": "system", "content": options.system}] if options.system else []
    stop = turn_end(tokenizer)
    while (line := _read_message()) is not None:
        messages.append({"role": "user", "content": line})
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer = stream(model, tokenizer, ids, options, stop)
        messages.append({"role": "assistant", "content": answer})
    return 0


def _read_message() -> str | None:
    """Return the next line, or None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def stream(
    model: Any,
    tokenizer: Any,
    prompt: list[int],
    options: argparse.Namespace,
    stop: int | None = None,
) -> str:
    """Generate after ``prompt``, print the text as it is made, and return it.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        prompt: Token ids.
        options: tokens, temperature, top_k and seed.
        stop: Id that ends the text, besides the model's own.

    Raises ConfigError if the prompt leaves no room in the model's context.
    """
    import torch
    from transformers import TextStreamer

    context = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    tokens = min(options.tokens, context - len(prompt))
    if tokens < 1:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens and the model's context {context}: shorten it"
        )
    own = model.generation_config.eos_token_id
    ends = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id, stop}
    sampling = {"do_sample": options.temperature > 0}
    if options.temperature > 0:
        sampling |= {"temperature": options.temperature, "top_k": options.top_k}
    torch.manual_seed(options.seed)
    ids = torch.tensor([prompt], device=model.device)
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        eos_token_id=sorted(ends - {None}),
        pad_token_id=tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **sampling,
    )
    return tokenizer.decode(found[0, len(prompt) :], skip_special_tokens=True)


def load_model(name: str) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a run, checkpoint, folder or name on the Hub.

    Raises CheckpointError if there is no model or no tokenizer.
    """
    from .. import storage
    from ..config.architecture import CONFIG, model_folder

    if storage.is_remote(name) or (Path(name).is_dir() and not _is_hf(Path(name))):
        with tempfile.TemporaryDirectory(prefix="nearlinear-") as work:
            return _load_folder(_export(name, Path(work) / "hf"), name)
    folder = model_folder(name)
    if not _is_hf(folder):
        raise CheckpointError(
            f"{name} is neither a run folder nor a model folder ({CONFIG} is missing): check the "
            "path"
        )
    return _load_folder(folder, name)


def _is_hf(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()


def _export(name: str, out: Path) -> Path:
    """Export the newest checkpoint of ``name`` to ``out``, adapters merged."""
    from ..checkpoint import index, metadata
    from ..checkpoint.hf.export import export_checkpoint
    from ..checkpoint.hf.writer import tokenizer_beside

    checkpoint = metadata.find_checkpoints(name)[-1]
    described = metadata.model_config(index.read(checkpoint))
    if described is None:
        raise CheckpointError(
            f"{checkpoint} does not contain the config of its model: export it first (nearlinear "
            f"export {checkpoint} OUT --config RUN/config.toml)"
        )
    return export_checkpoint(checkpoint, out, described, tokenizer=tokenizer_beside(checkpoint))


def _load_folder(folder: Path, name: str) -> tuple[Any, Any]:
    import torch

    from ..checkpoint.hf.meta_model import import_transformers

    transformers = import_transformers()
    kind = transformers.AutoModelForCausalLM
    if (folder / "adapter_config.json").is_file():
        from ..train.lora import import_peft

        kind = import_peft().AutoPeftModelForCausalLM
    try:
        model = kind.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{name}: no causal language model with its tokenizer ({reason}); nearlinear export "
            "--tokenizer FOLDER adds a tokenizer"
        ) from None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return model.to(device).eval(), tokenizer
