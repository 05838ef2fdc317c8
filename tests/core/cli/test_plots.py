"""Figures contain the numbers passed to them."""

import json

import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402

from ci import colors  # noqa: E402
from ci.notebooks.figures import hidden_labels  # noqa: E402
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


@pytest.mark.parametrize("vision", colors.VISION)
def test_any_two_colors_differ_for_any_color_vision(vision):
    assert colors.closest(plots.PALETTE, vision)[0] > 10


@pytest.mark.parametrize("color", plots.LINES)
def test_lines_stand_out_from_the_page(color):
    assert colors.contrast(color, "#ffffff") >= 3


@pytest.mark.parametrize("color", plots.PALETTE)
def test_text_on_any_color_is_legible(color):
    ax = plots.rank_map(Mesh(shard=8))
    text = ax.texts[plots.PALETTE.index(color)].get_color()
    assert colors.contrast(color, text.replace("white", "#ffffff")) > 3.5


@pytest.mark.parametrize("page", colors.PAGES)
def test_text_of_the_gallery_is_legible(page):
    for name, (ink, background) in colors.pairs(page).items():
        assert colors.contrast(ink, background) >= 4.5, name


# --- labels ---------------------------------------------------------------------------------------


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
    assert hidden_labels(FIGURES[figure]().figure) == []


def test_covered_labels_are_found():
    ax = plots.loss_curve(METRICS)
    ax.text(2, 8, "one")
    ax.text(2, 8, "two")
    assert "'one' overlaps 'two'" in hidden_labels(ax.figure)


def test_a_tick_just_beyond_the_axis_has_no_label():
    ax = plots.loss_curve(METRICS)
    ax.figure.set_layout_engine("none")
    ax.set(position=(0.1, 0.1, 0.9, 0.8), xscale="log", xlim=(1, 99.9), xlabel="")
    assert hidden_labels(ax.figure) == []
    ax.set_xlim(1, 100)
    (fault,) = hidden_labels(ax.figure)
    assert "10^{2}" in fault and fault.endswith("is cut off")
