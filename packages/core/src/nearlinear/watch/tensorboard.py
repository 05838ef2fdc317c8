"""`nearlinear dashboard`: TensorBoard on a run's folder, and where to find it in a browser."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from ..errors import ConfigError

STUDIO = Path("/opt/ml/metadata/resource-metadata.json")  # what a SageMaker Studio app is
PROXIES = {"JupyterLab": "/jupyterlab/default/proxy", "CodeEditor": "/codeeditor/default/proxy"}
PORTS = range(6006, 6106)


def run(folder: str = "", port: int = 0) -> NoReturn:
    """Become a server of the events below ``folder``, until Ctrl-C. Raises ConfigError."""
    if not folder:
        from ..train.tables import RunConfig

        folder = RunConfig().folder
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError('TensorBoard is not installed: pip install "nearlinear[monitor]"')
    if not any(Path(folder).rglob("*tfevents*")):
        raise ConfigError(
            f"{folder} holds no TensorBoard events: is run.folder another, or run.tensorboard off?"
        )
    port = port or free_port()
    print(f"TensorBoard: {address(port)}", flush=True)
    serve = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--port", str(port)]
    os.execv(sys.executable, [*serve, "--host", "127.0.0.1"])  # so that what ends us ends it


def free_port() -> int:
    """TensorBoard's usual port, or the next that is free."""
    for port in PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ConfigError(f"no port is free from {PORTS[0]} to {PORTS[-1]}: choose one by --port")


def address(port: int, studio: Path = STUDIO) -> str:
    """What to open: on this machine, or below the address of its SageMaker Studio app."""
    try:
        app = json.loads(studio.read_text()).get("AppType")
    except (OSError, ValueError):
        app = None
    if app not in PROXIES:
        return f"http://127.0.0.1:{port}/"
    return (
        f"in Studio, replace what follows .aws in the browser's address by {PROXIES[app]}/{port}/"
    )
