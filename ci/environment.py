"""Build and update .venv, the environment of everything in this repository.

Uses uv if it is on PATH, otherwise pip, and installs the versions in constraints.txt. A stamp file
records the inputs of the build, so that a changed or interrupted set-up is repaired on the next
call. Uses the Python standard library only, because it runs before anything is installed.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / "python"
LOG = VENV / "setup.log"
STAMP = VENV / "setup.json"
EXTRAS = "data,notebooks,monitor,kubernetes,s3,sagemaker,dev"
GLUE = "nearlinear_collectives.build"  # compiles ahead of the first import
# Not the Python of .venv, which may run this and be deleted.
INTERPRETER = getattr(sys, "_base_executable", sys.executable)
# Libraries that tests compare with. DeepSpeed is built from source with this environment's torch
# and without kernels; Megatron Core provides the reference reader of its file format.
PEERS = ["deepspeed", "megatron-core"]
PEERS_SETTINGS = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}

# Messages in an installer's log, and the remedy to print.
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
        "The package registry cannot be reached. Check the network, or set PIP_INDEX_URL to a "
        "mirror or PIP_FIND_LINKS to a folder of wheels.",
    ),
    (
        ("No matching distribution found", "No solution found", "ResolutionImpossible"),
        "A pinned version in constraints.txt has no build for this Python and platform. "
        "Try Python 3.11, or set PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL to a source of the build.",
    ),
]  # fmt: skip


class SetupError(Exception):
    """The environment cannot be built; the message states the cause and the remedy."""


def say(text: str) -> None:
    print(text, flush=True)


def packages() -> list[Path]:
    """Return the folders of this workspace's packages in the order of installation."""
    projects = [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("packages/*/*/pyproject.toml")]
    return sorted(path.parent for path in projects)


def fingerprint() -> str:
    """Return a hash of all inputs of the installation."""
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


def ensure(lab: bool = False, peers: bool = False, docs: bool = False) -> None:
    """Make .venv match constraints.txt and the packages.

    Args:
        lab: Add Jupyter Lab.
        peers: Add the libraries that tests compare with.
        docs: Add the packages that build the documentation site.
    """
    additions = {"lab": lab, "docs": docs}

    def ready() -> bool:
        stamp = read_stamp()
        same = stamp.get("fingerprint") == fingerprint() and works(PYTHON)
        return same and all(stamp.get(name) for name, wanted in additions.items() if wanted)

    def complete() -> bool:
        return ready() and (read_stamp().get("peers", False) or not peers)

    if complete():
        return
    with file_lock(ROOT / ".venv.lock"):
        if not ready():  # another ./run may have built it meanwhile
            build(additions)
        if not complete():
            add_peers()


def build(additions: dict[str, bool]) -> None:
    """Build or update .venv with the ``additions`` (extras of the core) and earlier ones."""
    uv = shutil.which("uv")
    old = read_stamp()
    additions = {name: wanted or old.get(name, False) for name, wanted in additions.items()}
    extras = ",".join([EXTRAS, *(name for name, wanted in additions.items() if wanted)])
    root_and_python = [str(ROOT), list(sys.version_info[:2])]
    # A finished environment of the same Python and installer is updated. Any other environment
    # (interrupted, moved, damaged) is rebuilt from scratch.
    built_with = [*root_and_python, "uv" if uv else "pip"]
    update = old.get("built_with") == built_with and works(PYTHON)
    say(f"{'Updating' if update else 'Building'} .venv with {built_with[-1]} (details: {LOG})")
    start = time.monotonic()
    if update:
        STAMP.unlink()
    else:
        if VENV.exists() and not LOG.exists() and any(VENV.iterdir()):
            raise SetupError(
                f"{VENV} exists and was not created by ./run. Move or delete it, then try again."
            )
        shutil.rmtree(VENV, ignore_errors=True)
        VENV.mkdir(exist_ok=True)
        LOG.touch()
        make = [INTERPRETER, "-m", "venv", str(VENV)] + (["--without-pip"] if uv else [])
        install_step("an empty environment", make, os.environ)

    pip, env = installer(uv)
    index = os.environ.get("TORCH_INDEX_URL")
    install_step(
        "PyTorch", [*pip, "torch", "numpy", *(["--index-url", index] if index else [])], env
    )
    compilation = None
    with ThreadPoolExecutor(max_workers=1) as background:
        for package in packages():
            target = str(package.relative_to(ROOT))
            if package.name == "core":
                target += f"[{extras}]"
            isolation = []
            tools = build_requirements(package)
            if any(tool.startswith("torch") for tool in tools):  # use the installed torch
                tools = [tool for tool in tools if not tool.startswith("torch")]
                if tools:
                    install_step(f"build tools of {package.name}", [*pip, *tools], env)
                isolation = ["--no-build-isolation"]
            install_step(target, [*pip, *isolation, "--editable", target], env)
            if package.name == "collectives":  # its compiler runs beside the next downloads
                glue = [str(PYTHON), "-m", GLUE]
                compilation = background.submit(
                    install_step, "the collectives' torch glue", glue, env, LOG.with_stem("glue")
                )
        if compilation:
            compilation.result()
    stamp = {"fingerprint": fingerprint(), "built_with": built_with, **additions}
    STAMP.write_text(json.dumps(stamp))
    say(f"Ready in {time.monotonic() - start:.0f} s.\n")


def installer(uv: str | None) -> tuple[list[str], dict[str, str]]:
    """Return the install command with pinned versions, and its environment variables."""
    pip = [uv, "pip", "install", "--python", str(PYTHON)] if uv else [
        str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]  # fmt: skip
    env = uv_environment(os.environ, pip_config()) if uv else dict(os.environ)
    return [*pip, "--constraint", "constraints.txt"], env


def add_peers() -> None:
    """Install the libraries of `PEERS`; without them, tests skip the comparisons."""
    pip, env = installer(shutil.which("uv"))
    missing = []
    for name in ("setuptools, wheel", *PEERS):
        try:
            command = [*pip, "--no-build-isolation", *name.split(", ")]
            install_step(name, command, {**env, **PEERS_SETTINGS})
        except SetupError as error:
            missing.append(name)
            say(f"{error}\nContinuing: tests that compare with {name} are skipped.")
    if not missing:
        STAMP.write_text(json.dumps({**read_stamp(), "peers": True}))


def build_requirements(package: Path) -> list[str]:
    project = tomllib.loads((package / "pyproject.toml").read_text())
    return project.get("build-system", {}).get("requires", [])


def install_step(name: str, command: list[str], env, log_file: Path | None = None) -> None:
    """Run one installer command with its output in a log, and print progress.

    Raises:
        SetupError: If the command fails; contains the end of its output and a remedy.
    """
    say(f"  {name} ...")
    start = reported = time.monotonic()
    log_file = log_file or LOG
    with log_file.open("a") as log:
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
        with terminate_on_exit(child):
            while child.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - reported >= 20:
                    reported = time.monotonic()
                    say(f"  {name} ... {reported - start:.0f} s")
    if child.returncode:
        output = log_file.read_bytes()[begin:].decode(errors="replace")
        tail = "\n".join("    " + line for line in output.splitlines()[-20:])
        raise SetupError(
            f"{tail}\n\n{name}: the installer failed. {remedy(output)}\nFull log: {log_file}"
        )
    say(f"  {name}: done in {time.monotonic() - start:.0f} s")


def remedy(output: str) -> str:
    """Return the remedy for a failure in an installer's output."""
    for signs, words in REMEDIES:
        if any(sign in output for sign in signs):
            return words
    return (
        "The last lines of its output are above; ./run repairs the environment when called again."
    )


def check_interpreter(interpreter: str) -> None:
    """Raise SetupError if there is no such program."""
    if shutil.which(interpreter) is None:
        raise SetupError(f"{interpreter} was not found. Choose another, such as python3.")


def side_environment(
    folder: Path, packages: Sequence[str], interpreter: str = sys.executable, *options: str
) -> Path:
    """Return the Python of a separate environment with some packages, built on first use.

    Args:
        folder: Folder of the environment. A complete one with the same packages is reused.
        packages: Requirements of pip.
        interpreter: Python of the environment.
        options: Further options of the installer.

    Raises:
        SetupError: If there is no such interpreter, or the installer fails; contains the end of
            its output.
    """
    check_interpreter(interpreter)
    found, stamp = folder / "bin" / "python", folder / "complete"
    wanted = "\n".join([interpreter, *packages, *options])
    if stamp.exists() and stamp.read_text() == wanted and works(found):
        return found
    uv = shutil.which("uv")
    make = [interpreter, "-m", "venv", "--clear", str(folder)] + (["--without-pip"] if uv else [])
    pip = [uv, "pip", "install", "--python", str(found)] if uv else [
        str(found), "-m", "pip", "install", "--disable-pip-version-check"]  # fmt: skip
    env = uv_environment(os.environ, pip_config()) if uv else dict(os.environ)
    for command in (make, [*pip, "--quiet", *options, *packages]):
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            output = (done.stderr or done.stdout).strip()[-2000:]
            raise SetupError(f"{output}\n\n{folder}: the installer failed. {remedy(output)}")
    stamp.write_text(wanted)
    return found


def pip_config() -> dict[str, str]:
    """Return pip's settings (pip.conf and PIP_*) by option name."""
    listing = subprocess.run(
        [INTERPRETER, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    pairs = (line.split("=", 1) for line in listing.splitlines() if "=" in line)
    found = {}
    for key, value in sorted(pairs, reverse=True):  # 'global.' first, ':env:.' overrides it
        found[key.rsplit(".", 1)[-1]] = value.strip("'\"")
    return found


def uv_environment(environ, config: dict[str, str]) -> dict[str, str]:
    """Return the environment for uv with pip's settings, which uv does not read itself.

    Settings of uv take precedence.
    """
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
    env.setdefault(
        "UV_INDEX_STRATEGY", "unsafe-best-match"
    )  # pip's rule: the best version of all indexes
    return env


@contextlib.contextmanager
def file_lock(path: Path):
    """Hold a lock file, so that two ./run do not build one environment concurrently."""
    with path.open("w") as lock:
        try:
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("Another ./run is building .venv; waiting for it ...")
                fcntl.flock(lock, fcntl.LOCK_EX)
        except (ImportError, OSError) as error:
            say(f"File locks are not available ({error}). Do not start two ./run at the same time.")
        yield


@contextlib.contextmanager
def terminate_on_exit(child: subprocess.Popen):
    """Terminate the child if the block is left early, as by Ctrl-C or a termination signal."""
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
