"""`nearlinear watch`: follow a run until Ctrl-C, on a terminal as one picture, else as lines."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

from ..errors import ConfigError
from ..train.report import ABOUT, METRICS, line
from .history import History
from .signs import alarms, stragglers
from .source import File, Pipe

PAUSE = 0.5  # seconds between looks
PIPE = "-"
LOGS = (".jsonl", ".log", ".out", ".txt")  # what is no folder, also before it is there
CONFIGS = (".toml", ".json")


class View:
    """A run that is being watched: its source of lines, and what they came to."""

    def __init__(self, source: File | Pipe, title: str, about: Path | None = None):
        self.source, self.title, self.about = source, title, about
        self.history = History()
        self._heard = math.nan  # when the last report came, or was made
        self._about_is_of = 0
        self._begun = time.monotonic()

    def look(self) -> list[dict]:
        """Read what is new; the steps reported in it."""
        another, lines = self.source.new()
        if another:
            self.history.clear()
        self._read_about()
        old = time.monotonic() - self._begun < 2 * PAUSE  # written before anybody watched
        now = time.time()
        rows = [self.history.read(text, math.nan if old else now) for text in lines]
        rows = [row for row in rows if row is not None]
        if rows:
            made = self.history["time"][-1]
            self._heard = made if old and math.isfinite(made) else now
        return rows

    def silence(self) -> float:
        """Seconds since the last report; 0 where no more is to come."""
        if self.source.ended or math.isnan(self._heard):
            return 0.0
        return max(0.0, time.time() - self._heard)

    def _read_about(self) -> None:
        if self.about is None:
            return
        try:
            changed = self.about.stat().st_mtime_ns
            if changed != self._about_is_of:
                self.history.about(self.about.read_text(encoding="utf-8"))
                self._about_is_of = changed
        except FileNotFoundError:
            return


def run(where: str = "", once: bool = False) -> int:
    """Watch the run in ``where``: a folder, a file, ``-`` for standard input, or "" for the usual
    folder. ``once``: as it stands, for a terminal or not. Raises ConfigError."""
    view = _view(where)
    if once:
        return _once(view)
    try:
        if sys.stdout.isatty():
            _on_terminal(view)
        else:
            _in_lines(view)
    except KeyboardInterrupt:
        pass
    if sys.stdout.isatty():
        _print(view)
    return 0


def _view(where: str) -> View:
    if where == PIPE:
        if sys.stdin.isatty():
            raise ConfigError(
                "nothing is piped in: nearlinear logs NAME --follow | nearlinear watch -"
            )
        return View(Pipe(sys.stdin.fileno()), "standard input")
    path = metrics_file(where)
    about = path.parent / ABOUT if path.name == METRICS else None
    return View(File(path), where or str(path.parent), about)


def metrics_file(where: str) -> Path:
    """The file to follow: ``where`` itself, or what a run in that folder reports to."""
    if not where:
        from ..train.tables import RunConfig

        where = RunConfig().folder
    path = Path(where)
    if path.suffix in CONFIGS and not path.is_dir():
        raise ConfigError(f"{path} is a config: watch the folder that its run.folder names")
    is_file = path.is_file() or (path.suffix in LOGS and not path.is_dir())
    return path if is_file else path / METRICS


def _once(view: View) -> int:
    if isinstance(view.source, Pipe):
        view.source.wait()
    elif not view.source.path.exists():
        raise ConfigError(
            f"{view.source.path}: no such file; is run.folder another? Without --once it is "
            "waited for"
        )
    view.look()
    _print(view)
    return 0


def _print(view: View) -> None:
    from rich.console import Console

    from .frame import frame

    console = Console(highlight=False)
    console.print(frame(view.history, view.title, console, view.silence()))


def _on_terminal(view: View) -> None:
    from rich.console import Console
    from rich.live import Live

    from .frame import frame

    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            ended = view.source.ended
            view.look()
            picture = frame(view.history, view.title, console, view.silence())
            live.update(picture, refresh=True)  # each time: the terminal may have been resized
            if ended:
                return
            time.sleep(PAUSE)


def _in_lines(view: View) -> None:
    """What is new, as the run itself prints it; what is wrong, when it begins to be."""
    told: set[str] = set()
    while True:
        ended = view.source.ended
        for row in view.look():
            numbers = {name: math.nan if value is None else value for name, value in row.items()}
            print(line(numbers), flush=True)
        signs = {f"rank {slow.rank}": f"slow: {slow}" for slow in stragglers(view.history)}
        signs |= {kind: f"! {text}" for kind, text in alarms(view.history, view.silence())}
        for kind, text in signs.items():
            if kind not in told:
                print(text, flush=True)
        told = set(signs)
        if ended:
            return
        time.sleep(PAUSE)
