"""Draw a run as one terminal screen: curves, bars and numbers from its `History`.

Curves use block characters in eighths where the terminal's encoding has them, ASCII elsewhere. The
screen adapts to the width and height of the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...output import format_duration, format_number, format_rate
from .history import History, find_alarms, find_stragglers

LABEL_WIDTH = 12
NUMBER_WIDTH = 9
MAX_LISTED_RANKS = 8
"""With more ranks, only the ranks with the most memory are listed."""
MAX_NAMED = 3
"""Stragglers, hosts and ranks listed by name when there are many."""
MAX_SOURCES = 8
MIN_WIDTH = 40

EIGHTHS = " ▁▂▃▄▅▆▇█"
ASCII = " .:-=+*#@"


def choose_levels(encoding: str) -> str:
    """Return nine characters from empty to full that ``encoding`` can represent."""
    try:
        EIGHTHS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return EIGHTHS


def draw_sparkline(values: Sequence[float], width: int, levels: str = EIGHTHS) -> str:
    """Draw ``values`` in one line of at most ``width`` characters."""
    return draw_chart(values, width, 1, levels)[0]


def draw_chart(
    values: Sequence[float], width: int, height: int, levels: str = EIGHTHS
) -> list[str]:
    """Draw ``values`` in ``height`` lines of at most ``width`` characters.

    Each column is the mean of its share of the values; columns without finite values are blank.
    """
    columns = _resample(values, width)
    finite = [value for value in columns if math.isfinite(value)]
    if not finite:
        return [""] * height
    low, high = min(finite), max(finite)
    full = len(levels) - 1
    marks = [_column_height(value, low, high, height * full) for value in columns]
    rows = []
    for row in reversed(range(height)):
        rows.append("".join(levels[max(0, min(full, mark - row * full))] for mark in marks))
    return rows


def draw_bar(share: float, width: int, levels: str = EIGHTHS) -> str:
    """Draw a bar of ``width`` characters, filled to ``share`` between 0 and 1."""
    filled = round(max(0.0, min(1.0, share)) * width)
    return levels[-1] * filled + (levels[1] * (width - filled))


def _resample(values: Sequence[float], width: int) -> list[float]:
    """Return at most ``width`` means of consecutive values."""
    width = max(1, width)
    if len(values) <= width:
        return list(values)
    edges = [i * len(values) // width for i in range(width + 1)]
    parts = (values[begin:end] for begin, end in zip(edges, edges[1:], strict=False))
    return [_finite_mean(part) for part in parts]


def _finite_mean(part: Sequence[float]) -> float:
    finite = [value for value in part if math.isfinite(value)]
    return sum(value / len(finite) for value in finite) if finite else math.nan


def _column_height(value: float, low: float, high: float, top: int) -> int:
    """Return the height of a column, 1 to ``top``, or 0 for a value that is not finite."""
    if not math.isfinite(value):
        return 0
    span = high / 2 - low / 2  # halves: the difference of two large floats overflows
    return 1 + round((value / 2 - low / 2) / span * (top - 1)) if span > 0 else max(1, top // 2)


def render_screen(
    history: History, title: str, console: Console, silence: float = 0.0
) -> RenderableType:
    """Render the run called ``title``. ``silence`` is the argument of `find_alarms`."""
    return _Screen(history, title, console).render(silence)


class _Screen:
    """Sections of a screen, each some lines of text."""

    def __init__(self, history: History, title: str, console: Console):
        self.history, self.title = history, title
        self.width = max(MIN_WIDTH, console.width)
        self.levels = choose_levels(console.encoding)
        self.curve = self.width - LABEL_WIDTH - NUMBER_WIDTH - 2
        self.height = max(2, min(8, console.height - 22))

    def render(self, silence: float) -> RenderableType:
        if not len(self.history):
            return Text(f"no step has been reported yet: {self.title}")
        alarms = find_alarms(self.history, silence)
        parts = [
            self._head(),
            *(Text(f"! {alarm.text}", style="bold red") for alarm in alarms),
            *self._stragglers(),
            Text(),
            *self._loss(),
            Text(),
            *self._rates(),
            *self._sources(),
            Text(),
            *self._memory(),
        ]
        return Group(*parts)

    def _head(self) -> RenderableType:
        history = self.history
        step, total = history["step"][-1], history.steps
        line = Table.grid(expand=True, padding=(0, 2))
        line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        line.add_column(no_wrap=True, justify="right")
        of = f" of {total}" if total else ""
        left = history.seconds_left()
        if history.done:
            when = "done"
        else:
            when = f"ETA {format_duration(left)}" if math.isfinite(left) else ""
        line.add_row(Text(self.title, style="bold"), Text(f"step {step:.0f}{of}   {when}".rstrip()))
        if not total:
            return line
        share = f" {step / total:.0%}"
        progress = draw_bar(step / total, self.width - len(share), self.levels)
        return Group(line, Text(progress + share, style="green"))

    def _loss(self) -> Iterator[Text]:
        history = self.history
        loss = history["loss"]
        finite = [value for value in loss if math.isfinite(value)]
        edges = {0: max(finite), self.height - 1: min(finite)} if finite else {}
        for row, line in enumerate(draw_chart(loss, self.curve, self.height, self.levels)):
            label = "loss" if row == 0 else ""
            yield self._line(label, format_number(edges.get(row, math.nan), ".4f"), line, "cyan")
        now = format_number(loss[-1], ".4f")
        summary = f"{now} now"
        if finite:
            summary += f", lowest {min(finite):.4f} at step {self._step_of_lowest('loss'):.0f}"
        yield self._line("", "", summary)
        held_out = [value for value in history["eval_loss"] if math.isfinite(value)]
        if held_out:
            value, step = history.last("eval_loss")
            curve = draw_sparkline(held_out, self.curve // 2, self.levels)
            yield self._line("held out", f"{value:.4f}", f"{curve} at step {step:.0f}", "magenta")

    def _step_of_lowest(self, name: str) -> float:
        pairs = zip(self.history[name], self.history["step"], strict=True)
        return min(pair for pair in pairs if math.isfinite(pair[0]))[1]

    def _rates(self) -> Iterator[Text]:
        history = self.history
        rates = history.recent("tokens_per_s")
        typical = median(rates) if rates else math.nan
        yield self._curve("tokens/s", format_rate(typical), "tokens_per_s")
        yield self._curve("grad norm", format_number(history["grad_norm"][-1], ".3f"), "grad_norm")
        yield self._curve("lr", format_number(history["lr"][-1], ".2e"), "lr")
        tflops, mfu = history.last("tflops_per_gpu")[0], history.last("mfu")[0]
        share = f"MFU {mfu:.1%}" if math.isfinite(mfu) else "MFU unknown"
        yield self._line("TFLOP/s", format_number(tflops, ".4g"), f"of each GPU; {share}")

    def _sources(self) -> Iterator[Text]:
        label = "epochs"
        by_epochs = sorted(self.history.epochs.items(), key=lambda item: -item[1])
        for name, epochs in by_epochs[:MAX_SOURCES]:
            yield self._line(label, f"{epochs:.3f}", f"of {name}")
            label = ""
        if rest := by_epochs[MAX_SOURCES:]:
            yield self._line("", "", f"and {len(rest)} sources read less often")

    def _memory(self) -> Iterator[Text]:
        history = self.history
        by_rank = history.by_rank("mem_gib_by_rank")
        label = "memory, GiB"
        if not by_rank:
            yield self._line(label, format_number(history.last("mem_gib")[0], ".2f"), "rank 0")
            return
        most, shown = max(by_rank), list(range(len(by_rank)))
        if len(by_rank) > MAX_LISTED_RANKS:
            summary = f"median of {len(by_rank)} ranks, {min(by_rank):.2f} to {most:.2f}"
            yield self._line(label, f"{median(by_rank):.2f}", summary)
            label, shown = "", sorted(shown, key=lambda rank: -by_rank[rank])[:MAX_NAMED]
        for rank in shown:
            share = by_rank[rank] / most if most else 0.0
            line = self._line(label, f"{by_rank[rank]:.2f}", "")
            line.append(draw_bar(share, min(30, self.curve // 2), self.levels), style="blue")
            yield line.append(f" {self._rank_name(rank)}")
            label = ""

    def _stragglers(self) -> Iterator[Text]:
        found = find_stragglers(self.history)
        for straggler in found[:MAX_NAMED]:
            yield Text(f"slow: {straggler}", style="yellow")
        rest = found[MAX_NAMED:]
        if rest:
            hosts = sorted({straggler.host for straggler in rest if straggler.host})
            where = f", on {', '.join(hosts[:MAX_NAMED])}" if hosts else ""
            more = " and others" if len(hosts) > MAX_NAMED else ""
            yield Text(f"slow: and {len(rest)} more ranks{where}{more}", style="yellow")

    def _rank_name(self, rank: int) -> str:
        hosts = self.history.hosts
        return f"rank {rank} on {hosts[rank]}" if rank < len(hosts) else f"rank {rank}"

    def _curve(self, label: str, value: str, name: str) -> Text:
        column = self.history[name][-4 * self.curve :]
        return self._line(label, value, draw_sparkline(column, self.curve, self.levels), "cyan")

    def _line(self, label: str, value: str, rest: str, style: str = "") -> Text:
        value = "" if value == "-" and not label else value
        text = Text(
            f"{label:<{LABEL_WIDTH}}{value:>{NUMBER_WIDTH}}  ", no_wrap=True, overflow="ellipsis"
        )
        return text.append(rest, style=style)
