"""Figures contain the numbers passed to them."""

import itertools
import json

import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402

from nearlinear import plots  # noqa: E402
from nearlinear.checkpoint.shards import TensorShard  # noqa: E402
from nearlinear.distributed.mesh import Mesh  # noqa: E402

METRICS = [
    {"step": 1, "loss": 10.0},
    {"step": 2, "loss": 8.0, "eval_loss": 8.5},
    {"step": 3, "loss": 7.0, "eval_loss": 7.5},
]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def test_loss_curve_has_both_losses_and_the_guessing_level():
    ax = plots.loss_curve(METRICS, vocabulary=50257)
    training, held_out, guessing = ax.lines
    assert list(training.get_ydata()) == [10.0, 8.0, 7.0]
    assert list(held_out.get_xdata()) == [2, 3]
    assert guessing.get_ydata()[0] == pytest.approx(10.825, abs=1e-3)


def test_saved_loss_curve_reads_the_metrics_file(tmp_path):
    lines = (json.dumps(row) + "\n" for row in METRICS)
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    path = plots.save_loss_curve(tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert not plt.get_fignums()


def test_document_lengths_mark_the_median():
    ax = plots.document_lengths([1, 5, 5, 5, 400])
    assert sum(patch.get_height() for patch in ax.patches) == 5
    assert ax.lines[0].get_xdata()[0] == 5


def test_rank_map_has_a_cell_per_rank_and_a_color_per_shard():
    ax = plots.rank_map(Mesh(replicate=2, shard=4, ranks_per_node=2))
    assert len(ax.patches) == 8
    assert [text.get_text() for text in ax.texts] == [str(rank) for rank in range(8)]
    colors = [patch.get_facecolor() for patch in ax.patches]
    assert colors[:4] == colors[4:] and len(set(colors)) == 4
    assert [label.get_text() for label in ax.get_yticklabels()] == ["replica 0", "replica 1"]


def test_figures_draw_on_given_axes():
    _, axes = plt.subplots()
    assert plots.rank_map(Mesh(shard=2), axes) is axes


def test_slices_are_drawn_at_their_offsets_with_their_ranks():
    halves = [[TensorShard((0, 0), (4, 3))], [TensorShard((0, 3), (4, 3))]]
    ax = plots.slices((4, 6), [*halves, *halves], title="two replicas")
    boxes = {(*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in ax.patches}
    assert boxes == {(0, 0, 3, 4), (3, 0, 3, 4)}
    assert {text.get_text() for text in ax.texts} == {"0, 2", "1, 3"}
    assert len({patch.get_facecolor() for patch in ax.patches}) == 2
    assert ax.get_title() == "two replicas" and ax.get_ylim() == (4, 0)


COLOR_VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                   [0.004733, 0.691367, 0.303900]],
}  # fmt: skip
"""Maps of linear RGB. Source: Machado, Oliveira and Fernandes 2009, severity 1."""


def linear_rgb(color: str):
    values = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def cielab(rgb):
    """Return CIE L*a*b* (D65) of linear RGB."""
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
              [0.0193339, 0.1191920, 0.9503041]]  # fmt: skip
    xyz = np.array(to_xyz) @ np.clip(rgb, 0, 1) / [0.95047, 1.0, 1.08883]
    x, y, z = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", COLOR_VISION)
def test_any_two_colors_differ_for_any_color_vision(vision):
    seen = [cielab(np.array(COLOR_VISION[vision]) @ linear_rgb(c)) for c in plots.PALETTE]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 15


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of WCAG 2."""
    weights = [0.2126, 0.7152, 0.0722]
    dark, light = sorted(float(linear_rgb(c) @ weights) for c in (first, second))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("color", plots.PALETTE)
def test_text_on_any_color_is_legible(color):
    ax = plots.rank_map(Mesh(shard=8))
    text = ax.texts[plots.PALETTE.index(color)].get_color()
    assert contrast(color, text.replace("white", "#ffffff")) > 3.5


# --- labels ---------------------------------------------------------------------------------------


def hidden_labels(ax) -> list[str]:
    """Return the texts that overlap another text or reach over the edge of the figure."""
    figure = ax.figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    ticks = [*ax.get_xticklabels(), *ax.get_yticklabels()]
    legend = ax.get_legend()
    texts = [*ticks, *ax.texts, ax.xaxis.label, ax.yaxis.label, ax.title]
    texts += legend.get_texts() if legend else []
    shown = [text for text in texts if text.get_visible() and text.get_text().strip()]
    high = ax.transAxes.transform((1, 1)) + 1
    low = ax.transAxes.transform((0, 0)) - 1
    boxes = []
    for text in shown:
        box = text.get_window_extent(renderer)
        # Matplotlib keeps, but does not draw, the labels of ticks beyond the limits.
        middle = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
        outside = text in ticks and not (
            low[0] <= middle[0] <= high[0] or low[1] <= middle[1] <= high[1]
        )
        if not outside:
            boxes.append((text.get_text(), box))
    faults = []
    for (one, first), (two, second) in itertools.combinations(boxes, 2):
        if first.x0 < second.x1 and second.x0 < first.x1:
            if first.y0 < second.y1 and second.y0 < first.y1:
                faults.append(f"{one!r} overlaps {two!r}")
    for name, box in boxes:
        (left, bottom), (right, top) = figure.bbox.min, figure.bbox.max
        if box.x0 < left or box.y0 < bottom or box.x1 > right or box.y1 > top:
            faults.append(f"{name!r} is cut off")
    return faults


def memory_axes():
    from nearlinear.memory import PARTS

    sizes = {key: 2**20 * (number + 1) for number, key in enumerate(PARTS)}
    return plots.memory({"mine": sizes, "most": sizes})


def long_loss_curve():
    steps = range(1, 1001)
    return plots.loss_curve(
        [{"step": n, "loss": 10 / n**0.2, "eval_loss": 11 / n**0.2} for n in steps]
    )


def slices_axes():
    quarter = [[TensorShard((row, column), (4, 4))] for row in (0, 4) for column in (0, 4)]
    return plots.slices((8, 8), [quarter[n // 2] for n in range(8)], title="weight of the head")


FIGURES = {
    "loss": long_loss_curve,
    "short loss": lambda: plots.loss_curve(METRICS),
    "memory": memory_axes,
    "short documents": lambda: plots.document_lengths([1, 2, 2, 3]),
    "long documents": lambda: plots.document_lengths(np.geomspace(10, 1e6, 500).astype(int)),
    "half of the documents at the end": lambda: plots.document_lengths([10] * 2 + [900] * 20),
    "4 ranks": lambda: plots.rank_map(Mesh(shard=2, replicate=2, ranks_per_node=2)),
    "32 ranks": lambda: plots.rank_map(Mesh(shard=32, ranks_per_node=8)),
    "256 ranks": lambda: plots.rank_map(Mesh(shard=128, replicate=2, ranks_per_node=8)),
    "slices": slices_axes,
}


@pytest.mark.parametrize("figure", FIGURES)
def test_no_label_is_covered_or_cut_off(figure):
    assert hidden_labels(FIGURES[figure]()) == []


def test_covered_labels_are_found():
    ax = plots.loss_curve(METRICS)
    ax.text(2, 8, "one")
    ax.text(2, 8, "two")
    assert "'one' overlaps 'two'" in hidden_labels(ax)
