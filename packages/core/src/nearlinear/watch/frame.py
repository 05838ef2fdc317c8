"""One picture of a run for the terminal, from its `History`: as wide and high as there is room."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import draw
from .history import History
from .signs import alarms, stragglers

LABEL = 12  # columns for what a line shows
NUMBER = 9  # and for its value
EACH_RANK = 8  # with more ranks than that, the extremes only
MOST_NAMED = 3
MOST_SOURCES = 8
LEAST_WIDTH = 40


def frame(history: History, title: str, console: Console, silence: float = 0.0) -> RenderableType:
    """The run ``title`` as it stands. ``silence``: see `signs.alarms`."""
    return _Frame(history, title, console).whole(silence)


class _Frame:
    """The parts of a picture, each some lines of text."""

    def __init__(self, history: History, title: str, console: Console):
        self.history, self.title = history, title
        self.width = max(LEAST_WIDTH, console.width)
        self.shades = draw.levels(console.encoding)
        self.curve = self.width - LABEL - NUMBER - 2
        self.height = max(2, min(8, console.height - 22))

    def whole(self, silence: float) -> RenderableType:
        if not len(self.history):
            return Text(f"no step has been reported yet: {self.title}")
        parts = [
            self._head(),
            *(Text(f"! {alarm.text}", style="bold red") for alarm in alarms(self.history, silence)),
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
            when = f"ETA {draw.duration(left)}" if math.isfinite(left) else ""
        line.add_row(Text(self.title, style="bold"), Text(f"step {step:.0f}{of}   {when}".rstrip()))
        if not total:
            return line
        share = f" {step / total:.0%}"
        progress = draw.bar(step / total, self.width - len(share), self.shades)
        return Group(line, Text(progress + share, style="green"))

    def _loss(self) -> Iterator[Text]:
        history = self.history
        loss = history["loss"]
        finite = [value for value in loss if math.isfinite(value)]
        edges = {0: max(finite), self.height - 1: min(finite)} if finite else {}
        for row, line in enumerate(draw.chart(loss, self.curve, self.height, self.shades)):
            label = "loss" if row == 0 else ""
            yield self._line(label, draw.number(edges.get(row, math.nan), ".4f"), line, "cyan")
        now = draw.number(loss[-1], ".4f")
        words = f"{now} now"
        if finite:
            words += f", lowest {min(finite):.4f} at step {self._step_of_lowest('loss'):.0f}"
        yield self._line("", "", words)
        held_out = [value for value in history["eval_loss"] if math.isfinite(value)]
        if held_out:
            value, step = history.last("eval_loss")
            curve = draw.sparkline(held_out, self.curve // 2, self.shades)
            yield self._line("held out", f"{value:.4f}", f"{curve} at step {step:.0f}", "magenta")

    def _step_of_lowest(self, name: str) -> float:
        pairs = zip(self.history[name], self.history["step"], strict=True)
        return min(pair for pair in pairs if math.isfinite(pair[0]))[1]

    def _rates(self) -> Iterator[Text]:
        history = self.history
        rates = history.recent("tokens_per_s")
        usual = median(rates) if rates else math.nan
        yield self._curve("tokens/s", draw.short(usual), "tokens_per_s")
        yield self._curve("grad norm", draw.number(history["grad_norm"][-1], ".3f"), "grad_norm")
        yield self._curve("lr", draw.number(history["lr"][-1], ".2e"), "lr")
        tflops, mfu = history.last("tflops_per_gpu")[0], history.last("mfu")[0]
        share = f"MFU {mfu:.1%}" if math.isfinite(mfu) else "MFU unknown"
        yield self._line("TFLOP/s", draw.number(tflops, ".4g"), f"of each GPU; {share}")

    def _sources(self) -> Iterator[Text]:
        label = "epochs"
        often = sorted(self.history.epochs.items(), key=lambda item: -item[1])
        for name, epochs in often[:MOST_SOURCES]:
            yield self._line(label, f"{epochs:.3f}", f"of {name}")
            label = ""
        if rest := often[MOST_SOURCES:]:
            yield self._line("", "", f"and {len(rest)} sources that were read less")

    def _memory(self) -> Iterator[Text]:
        history = self.history
        by_rank = history.by_rank("mem_gib_by_rank")
        label = "memory, GiB"
        if not by_rank:
            yield self._line(label, draw.number(history.last("mem_gib")[0], ".2f"), "rank 0")
            return
        most, shown = max(by_rank), list(range(len(by_rank)))
        if len(by_rank) > EACH_RANK:
            words = f"median of {len(by_rank)} ranks, which take {min(by_rank):.2f} to {most:.2f}"
            yield self._line(label, f"{median(by_rank):.2f}", words)
            label, shown = "", sorted(shown, key=lambda rank: -by_rank[rank])[:MOST_NAMED]
        for rank in shown:
            share = by_rank[rank] / most if most else 0.0
            line = self._line(label, f"{by_rank[rank]:.2f}", "")
            line.append(draw.bar(share, min(30, self.curve // 2), self.shades), style="blue")
            yield line.append(f" {self._name(rank)}")
            label = ""

    def _stragglers(self) -> Iterator[Text]:
        found = stragglers(self.history)
        for straggler in found[:MOST_NAMED]:
            yield Text(f"slow: {straggler}", style="yellow")
        rest = found[MOST_NAMED:]
        if rest:
            hosts = sorted({straggler.host for straggler in rest if straggler.host})
            where = f", on {', '.join(hosts[:MOST_NAMED])}" if hosts else ""
            more = " and others" if len(hosts) > MOST_NAMED else ""
            yield Text(f"slow: and {len(rest)} more ranks{where}{more}", style="yellow")

    def _name(self, rank: int) -> str:
        hosts = self.history.hosts
        return f"rank {rank} on {hosts[rank]}" if rank < len(hosts) else f"rank {rank}"

    def _curve(self, label: str, value: str, name: str) -> Text:
        column = self.history[name][-4 * self.curve :]
        return self._line(label, value, draw.sparkline(column, self.curve, self.shades), "cyan")

    def _line(self, label: str, value: str, rest: str, style: str = "") -> Text:
        value = "" if value == "-" and not label else value
        text = Text(f"{label:<{LABEL}}{value:>{NUMBER}}  ", no_wrap=True, overflow="ellipsis")
        return text.append(rest, style=style)
