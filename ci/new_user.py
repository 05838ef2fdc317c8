"""Follow the README as a new user, from built wheels alone: ``python -m ci.new_user``.

Installs the wheels of ``python -m ci.wheels`` into a new environment outside the repository and
runs three paths with its commands: a folder of text to ``transformers``' ``generate()``, supervised
fine-tuning of a small chat model, and an adapter for it. Prints the commands and their number.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ci.environment import ROOT, SetupError, side_environment

SENTENCES = ("The loader reads a batch of tokens.", "A rank keeps its shard of every layer.",
             "Replicas exchange gradients once per step.")  # fmt: skip
GENERATE = """\
import transformers
words = transformers.AutoTokenizer.from_pretrained("{model}")
model = transformers.AutoModelForCausalLM.from_pretrained("{model}")
made = model.generate(**words("{prompt}", return_tensors="pt"), max_new_tokens=12, do_sample=False,
                      pad_token_id=words.eos_token_id)
print(words.decode(made[0]))"""
CHAT_MODEL = """\
import tests.support.chats as chats, pathlib, torch, transformers
torch.manual_seed(0)
folder = chats.write_tokenizer(pathlib.Path("{model}"))
config = transformers.LlamaConfig(vocab_size=320, hidden_size=64, intermediate_size=128,
    num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256,
    bos_token_id=0, eos_token_id=0, pad_token_id=0)
transformers.LlamaForCausalLM(config).save_pretrained(folder)
talks = [chats.conversation(number) for number in range(60)]
chats.write_conversations(pathlib.Path("{dialogs}"), talks)"""

PATHS = {
    "text folder to generate()": [
        "nearlinear new my-run --data texts --steps 60",
        "nearlinear data text texts --out my-run/tokens",
        "nearlinear train my-run/run.toml",
        "nearlinear export my-run my-run/hf",
    ],
    "supervised fine-tuning": [
        "nearlinear new my-chat --data dialogs.jsonl --model chat-model --steps 60",
        "nearlinear data chat dialogs.jsonl --tokenizer chat-model --out my-chat/tokens",
        "nearlinear train my-chat/run.toml",
        "nearlinear generate my-chat --tokens 12 "
        "--prompt '<|user|>Which number follows 7?<|end|><|assistant|>'",
    ],
    "adapter (LoRA)": [
        "nearlinear new my-lora --data dialogs.jsonl --model chat-model --lora 8 --steps 30",
        "nearlinear data chat dialogs.jsonl --tokenizer chat-model --out my-lora/tokens",
        "nearlinear train my-lora/run.toml",
        "nearlinear export my-lora my-lora/adapter --adapter",
    ],
}
TIMEOUT = 1800  # seconds of one command, on a busy machine
MOST_COMMANDS = 5  # including the installation


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.new_user",
        description="Install the built wheels into a new environment, and train, fine-tune, adapt "
        "and generate with them (about 2 GB, ten minutes).",
    )
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="default: dist")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep everything in a folder")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="new-user-") as scratch:
        folder = (args.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            python = install(folder, args.wheels)
            prepare(folder, python)
            for name, commands in PATHS.items():
                follow(name, commands, folder, python)
            print(f"transformers: {generate(folder, python)!r}")
        except (SetupError, StepError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


class StepError(RuntimeError):
    """A command of the path failed. The message contains its output."""


def wheels_of(folder: Path) -> list[Path]:
    """Return the wheels for this machine: nearlinear and the collectives.

    Raises:
        StepError: A wheel is missing.
    """
    patterns = ("nearlinear-*-any.whl", f"nearlinear_collectives-*_{platform.machine()}.whl")
    found = [next(iter(sorted(folder.glob(pattern))), None) for pattern in patterns]
    if None in found:
        raise StepError(f"{folder} lacks {patterns[found.index(None)]}: run python -m ci.wheels")
    return [path.resolve() for path in found if path]


def install(folder: Path, wheels: Path) -> Path:
    """Install the wheels with all extras of one machine and return the Python."""
    core, collectives = wheels_of(wheels)
    begin = time.monotonic()
    python = side_environment(
        folder / "venv",
        [f"nearlinear[all] @ {core.as_uri()}", f"nearlinear-collectives @ {collectives.as_uri()}"],
        sys.executable,
        "--constraint",
        str(ROOT / "constraints.txt"),
    )
    print(f"installed in {time.monotonic() - begin:.0f} s", flush=True)
    where = run(f"{python} -c 'import nearlinear; print(nearlinear.__file__)'", folder, python)
    if str(folder) not in where:
        raise StepError(f"nearlinear is imported from {where}, not from the new environment")
    return python


def prepare(folder: Path, python: Path) -> None:
    """Write the user's material: texts, a chat model with random weights, and conversations."""
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(200):  # different ones: a share is held out by a hash of the text
        text = " ".join(SENTENCES * 40)
        (texts / f"{number}.txt").write_text(f"Chapter {number}. {text}")
    code = CHAT_MODEL.format(model=folder / "chat-model", dialogs=folder / "dialogs.jsonl")
    done = subprocess.run(
        [str(python), "-c", code],
        env=variables(python) | {"PYTHONPATH": str(ROOT)},  # only for tests.support
        cwd=folder,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise StepError(done.stderr[-2000:])


def follow(name: str, commands: list[str], folder: Path, python: Path) -> None:
    """Run the commands of one path and print them, their number and the last losses."""
    print(f"\n{name}: {1 + len(commands)} commands with pip install", flush=True)
    if 1 + len(commands) > MOST_COMMANDS:
        raise StepError(f"{name} takes more than {MOST_COMMANDS} commands")
    for command in commands:
        begin = time.monotonic()
        shown = run(command, folder, python)
        last = (shown.strip().splitlines() or [""])[-1]
        print(f"  $ {command}\n    {time.monotonic() - begin:.0f} s: {last[:160]}", flush=True)
    run_folder = folder / shlex.split(commands[0])[2]
    losses = [entry["loss"] for entry in metrics(run_folder) if "loss" in entry]
    if not losses or losses[-1] >= losses[0]:
        raise StepError(f"{name}: the loss did not fall: {losses[:1]} to {losses[-1:]}")
    print(f"  loss {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} logged steps", flush=True)


def metrics(folder: Path) -> list[dict]:
    """Return the metrics of a run."""
    files = sorted(folder.rglob("metrics.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def generate(folder: Path, python: Path) -> str:
    """Continue a sentence of the texts with transformers alone, without nearlinear."""
    code = GENERATE.format(model="my-run/hf", prompt="The loader reads")
    return run(f"{python} -c {shlex.quote(code)}", folder, python).strip()


def run(command: str, folder: Path, python: Path) -> str:
    """Run one command of the environment and return its output. Raises StepError."""
    try:
        done = subprocess.run(
            shlex.split(command),
            cwd=folder,
            env=variables(python),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise StepError(f"{command}\ntook longer than {TIMEOUT} seconds") from None
    if done.returncode:
        raise StepError(f"{command}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def variables(python: Path) -> dict[str, str]:
    """Return the environment variables of the user's shell, without the repository's."""
    prefixes = ("PYTHON", "VIRTUAL_ENV", "NEARLINEAR")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    path = f"{python.parent}{os.pathsep}{inherited.get('PATH', os.defpath)}"
    return inherited | {"PATH": path, "HF_HUB_OFFLINE": "1"}


if __name__ == "__main__":
    sys.exit(main())
