"""Check the figures of notebooks: legible labels and alternative texts.

The kernels of `ci.notebooks.execute` load this module as an IPython extension. It checks the labels
of every figure when matplotlib writes it, and prints the faults to the cell's standard error.
`faults` finds them in the executed notebook, together with figures without alternative text.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from typing import Any

FAULT = "figure labels: "
REMEDY = "show it with nearlinear.plots.show(alt=...)"


def load_ipython_extension(shell: Any) -> None:
    from matplotlib.backend_bases import FigureCanvasBase

    write = FigureCanvasBase.print_figure

    @functools.wraps(write)
    def print_figure(canvas: Any, *args: Any, **options: Any) -> Any:
        for fault in hidden_labels(canvas.figure, cut=options.get("bbox_inches") != "tight"):
            print(f"{FAULT}{fault}", file=sys.stderr)
        return write(canvas, *args, **options)

    FigureCanvasBase.print_figure = print_figure


def faults(notebook: Any) -> list[str]:
    """Return the faults of the figures of an executed notebook."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if any(kind.startswith("image/") for kind in output.get("data", {})):
                if not alternative_text(output):
                    found.append(f"a figure has no alternative text: {REMEDY}")
            elif output.get("name") == "stderr":
                lines = output["text"].splitlines()
                found += [line for line in lines if line.startswith(FAULT)]
    return found


def alternative_text(output: Any) -> str:
    """Return the alternative text of an output, or an empty string."""
    metadata = output.get("metadata", {})
    texts = (value.get("alt") for value in metadata.values() if isinstance(value, dict))
    return next(filter(None, texts), "")


def hidden_labels(figure: Any, cut: bool = True) -> list[str]:
    """Return the texts that overlap another text or, with ``cut``, leave the figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if not hasattr(figure.canvas, "get_renderer"):
        FigureCanvasAgg(figure)
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    boxes = []
    for text in _shown_texts(figure):
        boxes.append((text.get_text(), text.get_window_extent(renderer)))
    found = []
    for (one, first), (two, second) in itertools.combinations(boxes, 2):
        if first.x0 < second.x1 and second.x0 < first.x1:
            if first.y0 < second.y1 and second.y0 < first.y1:
                found.append(f"{one!r} overlaps {two!r}")
    for name, box in boxes if cut else ():
        (left, bottom), (right, top) = figure.bbox.min, figure.bbox.max
        if box.x0 < left or box.y0 < bottom or box.x1 > right or box.y1 > top:
            found.append(f"{name!r} is cut off")
    return found


def _shown_texts(figure: Any) -> Iterator[Any]:
    legends = [*figure.legends, *(ax.get_legend() for ax in figure.axes)]
    texts = [*figure.texts, *(text for legend in legends if legend for text in legend.get_texts())]
    for ax in figure.axes:
        texts += [*ax.texts, ax.title]
        if ax.axison:
            texts += [ax.xaxis.label, ax.yaxis.label, *_tick_labels(ax)]
    if figure._suptitle is not None and figure._suptitle not in texts:
        texts.append(figure._suptitle)
    yield from (text for text in texts if text.get_visible() and text.get_text().strip())


def _tick_labels(ax: Any) -> Iterator[Any]:
    """Yield the drawn labels. Matplotlib keeps those of ticks beyond the limits."""
    pixels = 1e-6  # of rounding; a tick further outside is not drawn
    low = ax.transAxes.transform((0, 0)) - pixels
    high = ax.transAxes.transform((1, 1)) + pixels
    for axis, place in ((ax.xaxis, 0), (ax.yaxis, 1)):
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            point = (tick.get_loc(), 0) if place == 0 else (0, tick.get_loc())
            to_pixels = ax.get_xaxis_transform() if place == 0 else ax.get_yaxis_transform()
            where = to_pixels.transform(point)[place]
            if low[place] <= where <= high[place]:
                yield from (label for label in (tick.label1, tick.label2) if label.get_visible())
