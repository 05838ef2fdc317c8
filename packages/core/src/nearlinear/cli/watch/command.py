"""``nearlinear watch`` follows a run in the terminal; ``nearlinear dashboard`` starts TensorBoard.

On a terminal, `watch` redraws one screen; elsewhere it prints new lines. Modules that draw are
imported when a command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from ...errors import ConfigError
from ...train.metrics import ABOUT_FILE, METRICS_FILE, format_line
from .history import FollowedFile, FollowedPipe, History, find_alarms, find_stragglers

POLL_SECONDS = 0.5
PIPE = "-"
"""Argument that stands for standard input."""
LOG_SUFFIXES = (".jsonl", ".log", ".out", ".txt")
"""Suffixes of files, as opposed to run folders, also before they exist."""
CONFIG_SUFFIXES = (".toml", ".json")

STUDIO_METADATA = Path("/opt/ml/metadata/resource-metadata.json")
"""Description of a SageMaker Studio app, present on its machine."""
STUDIO_PROXIES = {
    "JupyterLab": "/jupyterlab/default/proxy",
    "CodeEditor": "/codeeditor/default/proxy",
}
"""Path of a local port behind the address of a Studio app, by app type."""
TENSORBOARD_PORTS = range(6006, 6106)

WATCH_EXAMPLES = """\
examples:
  nearlinear watch                                     the run in runs/latest, until Ctrl-C
  nearlinear watch runs/gpt2                           another run folder, also before it exists
  nearlinear watch runs/gpt2 --once                    the current state; needs no terminal
  nearlinear watch slurm-1234.out                      any log that contains the run's lines
  nearlinear logs gpt2-30b-20261122031500 --follow | nearlinear watch -
"""
DASHBOARD_EXAMPLES = """\
examples:
  nearlinear dashboard runs/gpt2                       one run
  nearlinear dashboard runs                            all runs below a folder
  nearlinear dashboard runs/gpt2 --port 6007
"""


def add_commands(commands: argparse._SubParsersAction) -> None:
    """Add ``watch`` and ``dashboard`` to the subcommands of ``nearlinear``."""
    watch = commands.add_parser(
        "watch",
        help="watch a run in the terminal: loss, throughput, memory, stragglers",
        description="Watch a run: training and held-out loss, remaining time, throughput, memory "
        "per rank, stragglers and alarms. Reads the files of the run, or the lines of a log, and "
        "does not disturb the run.",
        epilog=WATCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    watch.add_argument(
        "where",
        nargs="?",
        default="",
        metavar="FOLDER",
        help="a run folder, its metrics.jsonl, a log, or - for standard input; default: "
        "runs/latest",
    )
    watch.add_argument("--once", action="store_true", help="print the current state and exit")
    watch.set_defaults(run=lambda options, arguments: run_watch(options.where, options.once))

    dashboard = commands.add_parser(
        "dashboard",
        help="show runs in a browser with TensorBoard",
        description="Serve the TensorBoard events of runs on this machine until Ctrl-C, and print "
        "the address to open, also in SageMaker Studio.",
        epilog=DASHBOARD_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    dashboard.add_argument(
        "folder",
        nargs="?",
        default="",
        metavar="FOLDER",
        help="a run folder, or a folder of runs; default: runs/latest",
    )
    dashboard.add_argument(
        "--port", type=int, default=0, help="port to listen on; default: the first free from 6006"
    )
    dashboard.set_defaults(
        run=lambda options, arguments: run_dashboard(options.folder, options.port)
    )


class WatchedRun:
    """A followed file or pipe, and the history of the steps read from it."""

    def __init__(self, source: FollowedFile | FollowedPipe, title: str, about: Path | None = None):
        self.source, self.title, self.about = source, title, about
        self.history = History()
        self._last_report = math.nan  # time.time() at which the newest report arrived or was made
        self._about_mtime_ns = 0
        self._started = time.monotonic()

    def poll(self) -> list[dict[str, Any]]:
        """Read the new lines and return the metrics of the steps reported in them."""
        replaced, lines = self.source.read_new()
        if replaced:
            self.history.clear()
        self._read_about()
        # lines of the first polls were written before, so the time of their arrival means nothing
        backlog = time.monotonic() - self._started < 2 * POLL_SECONDS
        now = time.time()
        rows = [self.history.read(text, math.nan if backlog else now) for text in lines]
        rows = [row for row in rows if row is not None]
        if rows:
            reported = self.history["time"][-1]
            self._last_report = reported if backlog and math.isfinite(reported) else now
        return rows

    def seconds_since_report(self) -> float:
        """Return the seconds since the newest report, or 0 if the source has ended."""
        if self.source.ended or math.isnan(self._last_report):
            return 0.0
        return max(0.0, time.time() - self._last_report)

    def _read_about(self) -> None:
        if self.about is None:
            return
        try:
            changed = self.about.stat().st_mtime_ns
            if changed != self._about_mtime_ns:
                self.history.read_about(self.about.read_text(encoding="utf-8"))
                self._about_mtime_ns = changed
        except FileNotFoundError:
            return


def run_watch(where: str = "", once: bool = False) -> int:
    """Watch a run until Ctrl-C or the end of its log, and return the exit code.

    Args:
        where: Run folder, file, "-" for standard input, or "" for the default run folder.
        once: Print the current state and return.

    Raises:
        ConfigError: There is nothing to read.
    """
    run = _open_run(where)
    if once:
        return _print_once(run)
    _announce_missing_file(run)
    try:
        if sys.stdout.isatty():
            _follow_on_terminal(run)
        else:
            _follow_in_lines(run)
    except KeyboardInterrupt:
        pass
    if sys.stdout.isatty():
        _print_screen(run)
    return 0


def _open_run(where: str) -> WatchedRun:
    if where == PIPE:
        if sys.stdin.isatty():
            raise ConfigError(
                "watch - reads standard input, which is a terminal: pipe a log into it, as in "
                "nearlinear logs NAME --follow | nearlinear watch -"
            )
        return WatchedRun(FollowedPipe(sys.stdin.fileno()), "standard input")
    path = find_metrics_file(where)
    about = path.parent / ABOUT_FILE if path.name == METRICS_FILE else None
    return WatchedRun(FollowedFile(path), where or str(path.parent), about)


def find_metrics_file(where: str) -> Path:
    """Return the file to follow: ``where`` itself, or the metrics file of that run folder."""
    if not where:
        from ...config.train import RunConfig

        where = RunConfig().folder
    path = Path(where)
    if path.suffix in CONFIG_SUFFIXES and not path.is_dir():
        raise ConfigError(f"{path} is a config file: watch the folder named by its run.folder")
    is_file = path.is_file() or (path.suffix in LOG_SUFFIXES and not path.is_dir())
    return path if is_file else path / METRICS_FILE


def _announce_missing_file(run: WatchedRun) -> None:
    """Print the file that `watch` waits for, and the runs that exist nearby, to stderr."""
    if isinstance(run.source, FollowedPipe) or run.source.path.exists():
        return
    missing = run.source.path
    folder = next((each for each in missing.parents if each.is_dir()), Path("."))
    runs = sorted(str(found.parent) for found in folder.glob(f"*/{METRICS_FILE}"))
    nearby = f" Runs in {folder}: {', '.join(runs[:5])}." if runs else ""
    print(f"waiting for {missing}, which does not exist yet.{nearby}", file=sys.stderr, flush=True)


def _print_once(run: WatchedRun) -> int:
    if isinstance(run.source, FollowedPipe):
        run.source.wait()
    elif not run.source.path.exists():
        raise ConfigError(
            f"{run.source.path}: no such file. Check run.folder of the run, or drop --once to wait "
            "for the file"
        )
    run.poll()
    _print_screen(run)
    return 0


def _print_screen(run: WatchedRun) -> None:
    from rich.console import Console

    from .screen import render_screen

    console = Console(highlight=False)
    console.print(render_screen(run.history, run.title, console, run.seconds_since_report()))


def _follow_on_terminal(run: WatchedRun) -> None:
    from rich.console import Console
    from rich.live import Live

    from .screen import render_screen

    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            ended = run.source.ended
            run.poll()
            picture = render_screen(run.history, run.title, console, run.seconds_since_report())
            live.update(picture, refresh=True)  # each time: the terminal may have been resized
            if ended:
                return
            time.sleep(POLL_SECONDS)


def _follow_in_lines(run: WatchedRun) -> None:
    """Print new steps in the format of the run itself, and each alarm when it starts."""
    printed: set[str] = set()
    while True:
        ended = run.source.ended
        for row in run.poll():
            numbers = {name: math.nan if value is None else value for name, value in row.items()}
            print(format_line(numbers), flush=True)
        stragglers = find_stragglers(run.history)
        alarms = find_alarms(run.history, run.seconds_since_report())
        active = {f"rank {straggler.rank}": f"slow: {straggler}" for straggler in stragglers}
        active |= {kind: f"! {text}" for kind, text in alarms}
        for kind, text in active.items():
            if kind not in printed:
                print(text, flush=True)
        printed = set(active)
        if ended:
            return
        time.sleep(POLL_SECONDS)


def run_dashboard(folder: str = "", port: int = 0) -> NoReturn:
    """Replace this process by a TensorBoard server of the events below ``folder``.

    Raises ConfigError if TensorBoard is not installed or the folder holds no events.
    """
    if not folder:
        from ...config.train import RunConfig

        folder = RunConfig().folder
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError('TensorBoard is not installed: pip install "nearlinear[monitor]"')
    if not any(Path(folder).rglob("*tfevents*")):
        raise ConfigError(
            f"{folder} holds no TensorBoard events: check run.folder of the run, and that its "
            "run.tensorboard is true"
        )
    port = port or find_free_port()
    print(f"TensorBoard: {format_address(port)}", flush=True)
    serve = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--port", str(port)]
    # exec, so that a signal to this process ends the server
    os.execv(sys.executable, [*serve, "--host", "127.0.0.1"])


def find_free_port() -> int:
    """Return TensorBoard's default port, or the next free one."""
    for port in TENSORBOARD_PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ConfigError(
        f"no port from {TENSORBOARD_PORTS[0]} to {TENSORBOARD_PORTS[-1]} is free: choose one with "
        "--port"
    )


def format_address(port: int, metadata: Path = STUDIO_METADATA) -> str:
    """Return the address to open: on this machine, or behind its SageMaker Studio app."""
    try:
        app = json.loads(metadata.read_text()).get("AppType")
    except (OSError, ValueError):
        app = None
    if app not in STUDIO_PROXIES:
        return f"http://127.0.0.1:{port}/"
    return (
        "in Studio, replace the part of the browser's address after .aws by "
        f"{STUDIO_PROXIES[app]}/{port}/"
    )
