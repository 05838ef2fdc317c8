"""Build and keep up .venv, the one environment everything in this repository runs in.

Uses uv when it is on PATH and pip otherwise, installs the versions in constraints.txt, and leaves a
stamp of what it was built from: a changed or interrupted set-up repairs itself on the next call.
Python standard library only, for it runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / "python"
LOG = VENV / "setup.log"
STAMP = VENV / "setup.json"
EXTRAS = "data,notebooks,monitor,kubernetes,s3,sagemaker,dev"
GLUE = "nearlinear_collectives.build"  # compiles what the first import would otherwise
# What tests compare with: the first is made from source, with this environment's torch and no
# kernels; the second is wanted for its files' reader.
PEERS = ["deepspeed", "megatron-core"]
PEERS_SETTINGS = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}

# What an installer's log says, and what to tell the person who reads it.
REMEDIES = [
    (
        ("No space left on device", "os error 28"),
        "The disk is full. The environment needs about 2 GB, and 8 GB with CUDA builds of torch.",
    ),
    (
        ("ensurepip is not available", "No module named ensurepip", "No module named venv"),
        "Python's venv module is incomplete. On Debian or Ubuntu: sudo apt install python3-venv",
    ),
    (
        ("Temporary failure in name resolution", "NewConnectionError", "dns error",
         "Failed to fetch", "Connection refused", "ConnectTimeout", "Read timed out",
         "error sending request", "Network is unreachable", "Max retries exceeded"),
        "The package registry cannot be reached. Check the network, or name a mirror in "
        "PIP_INDEX_URL, or a folder of wheels in PIP_FIND_LINKS.",
    ),
    (
        ("No matching distribution found", "No solution found", "ResolutionImpossible"),
        "A pinned version in constraints.txt has no build for this Python and platform. "
        "Try Python 3.11, or name where the build is in PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL.",
    ),
]  # fmt: skip


class SetupError(Exception):
    """The environment cannot be made; the message says why and what to do, in plain words."""


def say(text: str) -> None:
    print(text, flush=True)


def packages() -> list[Path]:
    """Folders of this workspace's packages, core first."""
    found = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
    return sorted(found, key=lambda path: path.name != "core")


def fingerprint() -> str:
    """A hash of everything that decides what is installed, and where."""
    digest = hashlib.sha256(f"{ROOT} {sys.version_info[:2]} {EXTRAS}".encode())
    parts = [ROOT / "constraints.txt"]
    for package in packages():
        parts += [package / "pyproject.toml", package / "setup.py"]
    for part in parts:
        if part.exists():
            digest.update(str(part.relative_to(ROOT)).encode() + b"\0" + part.read_bytes())
    return digest.hexdigest()


def read_stamp() -> dict:
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def works(python: Path) -> bool:
    try:
        return subprocess.run([str(python), "-c", ""], capture_output=True).returncode == 0
    except OSError:
        return False


def ensure(lab: bool = False, peers: bool = False) -> None:
    """Make .venv match constraints.txt and the packages; at once when it already does.

    ``lab`` adds Jupyter Lab, ``peers`` the libraries that tests compare with; both stay.
    """

    def ready() -> bool:
        stamp = read_stamp()
        same = stamp.get("fingerprint") == fingerprint() and works(PYTHON)
        return same and (stamp.get("lab", False) or not lab)

    def complete() -> bool:
        return ready() and (read_stamp().get("peers", False) or not peers)

    if complete():
        return
    with only_one(ROOT / ".venv.lock"):
        if not ready():  # another ./run may have built it while this one waited
            build(lab)
        if not complete():
            add_peers()


def build(lab: bool) -> None:
    uv = shutil.which("uv")
    old = read_stamp()
    lab = lab or old.get("lab", False)
    root_and_python = [str(ROOT), list(sys.version_info[:2])]
    # An update goes on top of a finished environment made by the same Python and installer;
    # anything else (interrupted, moved, damaged) is rebuilt from nothing.
    built_with = [*root_and_python, "uv" if uv else "pip"]
    update = old.get("built_with") == built_with and works(PYTHON)
    say(f"{'Updating' if update else 'Building'} .venv with {built_with[-1]} (details: {LOG})")
    start = time.monotonic()
    if update:
        STAMP.unlink()
    else:
        if VENV.exists() and not LOG.exists() and any(VENV.iterdir()):
            raise SetupError(
                f"{VENV} exists and was not made by ./run. Move or delete it, then try again."
            )
        shutil.rmtree(VENV, ignore_errors=True)
        VENV.mkdir(exist_ok=True)
        LOG.touch()
        make = [sys.executable, "-m", "venv", str(VENV)] + (["--without-pip"] if uv else [])
        install_step("an empty environment", make, os.environ)

    pip, env = installer(uv)
    index = os.environ.get("TORCH_INDEX_URL")
    install_step(
        "PyTorch", [*pip, "torch", "numpy", *(["--index-url", index] if index else [])], env
    )
    for package in packages():
        target = f"packages/{package.name}"
        if package.name == "core":
            target += f"[{EXTRAS}{',lab' if lab else ''}]"
        isolation = []
        tools = build_requirements(package)
        if any(
            tool.startswith("torch") for tool in tools
        ):  # compiled against the torch just installed
            tools = [tool for tool in tools if not tool.startswith("torch")]
            if tools:
                install_step(f"build tools of {package.name}", [*pip, *tools], env)
            isolation = ["--no-build-isolation"]
        install_step(target, [*pip, *isolation, "--editable", target], env)
    if any(package.name == "collectives" for package in packages()):
        install_step("the collectives' torch glue", [str(PYTHON), "-m", GLUE], env)
    stamp = {"fingerprint": fingerprint(), "built_with": built_with, "lab": lab}
    STAMP.write_text(json.dumps(stamp))
    say(f"Ready in {time.monotonic() - start:.0f} s.\n")


def installer(uv: str | None) -> tuple[list[str], dict[str, str]]:
    """The command that installs the pinned versions of what is named after it, and its settings."""
    pip = [uv, "pip", "install", "--python", str(PYTHON)] if uv else [
        str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]  # fmt: skip
    env = uv_environment(os.environ, pip_config()) if uv else dict(os.environ)
    return [*pip, "--constraint", "constraints.txt"], env


def add_peers() -> None:
    """On top of a finished environment. Tests run without them too, and skip the comparisons."""
    pip, env = installer(shutil.which("uv"))
    missing = []
    for what in ("setuptools, wheel", *PEERS):
        try:
            command = [*pip, "--no-build-isolation", *what.split(", ")]
            install_step(what, command, {**env, **PEERS_SETTINGS})
        except SetupError as error:
            missing.append(what)
            say(f"{error}\nGoing on without: tests that compare with {what} are skipped.")
    if not missing:
        STAMP.write_text(json.dumps({**read_stamp(), "peers": True}))


def build_requirements(package: Path) -> list[str]:
    project = tomllib.loads((package / "pyproject.toml").read_text())
    return project.get("build-system", {}).get("requires", [])


def install_step(what: str, command: list[str], env) -> None:
    """Run one installer command, its output in the log; say what is being done and for how long."""
    say(f"  {what} ...")
    start = told = time.monotonic()
    with LOG.open("a") as log:
        print(f"$ {' '.join(command)}", file=log, flush=True)
        begin = log.tell()
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        with ended_with_us(child):
            while child.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - told >= 20:
                    told = time.monotonic()
                    say(f"  {what} ... {told - start:.0f} s")
    if child.returncode:
        output = LOG.read_bytes()[begin:].decode(errors="replace")
        tail = "\n".join("    " + line for line in output.splitlines()[-20:])
        raise SetupError(
            f"{tail}\n\n{what}: the installer failed. {remedy(output)}\nFull log: {LOG}"
        )
    say(f"  {what}: done in {time.monotonic() - start:.0f} s")


def remedy(output: str) -> str:
    """Plain words for what an installer's output says went wrong."""
    for signs, words in REMEDIES:
        if any(sign in output for sign in signs):
            return words
    return "Its last lines are above; ./run repairs the environment when called again."


def pip_config() -> dict[str, str]:
    """pip's own settings for where packages come from (pip.conf and PIP_*), by option name."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    pairs = (line.split("=", 1) for line in listing.splitlines() if "=" in line)
    found = {}
    for key, value in sorted(pairs, reverse=True):  # 'global.' first, so that ':env:.' wins
        found[key.rsplit(".", 1)[-1]] = value.strip("'\"")
    return found


def uv_environment(environ, config: dict[str, str]) -> dict[str, str]:
    """The environment for uv, which does not read pip's settings; its own ones win."""
    env = dict(environ)
    names = {
        "find-links": "UV_FIND_LINKS",
        "index-url": "UV_DEFAULT_INDEX",
        "extra-index-url": "UV_INDEX",
    }
    for option, name in names.items():
        value = environ.get("PIP_" + option.upper().replace("-", "_")) or config.get(option)
        if value:
            separator = "," if option == "find-links" else " "
            env.setdefault(name, separator.join(value.replace("\\n", " ").split()))
    env.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # pip's rule: the best of all indexes
    return env


@contextlib.contextmanager
def only_one(path: Path):
    """Hold a lock file, so that two ./run do not build one environment at once."""
    with path.open("w") as lock:
        try:
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("Another ./run is building .venv; waiting for it ...")
                fcntl.flock(lock, fcntl.LOCK_EX)
        except (ImportError, OSError) as error:
            say(f"(no file locks here: {error}; do not start two ./run at once)")
        yield


@contextlib.contextmanager
def ended_with_us(child: subprocess.Popen):
    """Whatever ends this block early (Ctrl-C, a termination signal) ends the child too."""
    try:
        yield
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(timeout=15)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
