"""Draw the README's figure: ``python -m ci.notebooks.overview`` writes notebooks/overview.svg.

The left panel shows full sharding (ZeRO-3, FSDP): one group of all ranks. The right panel shows
MiCS: small shard groups, and replicas that are synchronized once per step.
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle  # noqa: E402

from nearlinear.distributed.mesh import Mesh  # noqa: E402
from nearlinear.plots import INK, MUTED, PALETTE  # noqa: E402

TARGET = Path(__file__).resolve().parents[2] / "notebooks" / "overview.svg"
PITCH = 3.3  # vertical distance of replicas
SHADES = ["#dbeafe", "#bfdbfe", "#93c5fd", "#60a5fa", "#3b82f6", "#2563eb", "#1d4ed8", "#1e3a8a"]


def rank(ax, x, y, number, shard, shards, colour):
    """Draw a rank as a frame of the model's height with its shard filled."""
    ax.add_patch(Rectangle((x, y), 0.8, 1.6, facecolor="#f3f4f6", edgecolor=MUTED, lw=0.8))
    height = 1.6 / shards
    at = y + 1.6 - (shard + 1) * height
    ax.add_patch(Rectangle((x, at), 0.8, height, facecolor=colour, edgecolor="none"))
    ax.text(x + 0.4, y - 0.1, f"rank {number}", ha="center", va="top", fontsize=8, color=INK)


def group(ax, x, y, width, label, colour):
    """Draw a frame around the ranks of a shard group."""
    style = "round,pad=0.08,rounding_size=0.15"
    frame = FancyBboxPatch((x, y), width, 2.15, boxstyle=style, fill=False, ec=colour, lw=1.8)
    ax.add_patch(frame)
    ax.text(x + width / 2, y + 2.34, label, ha="center", fontsize=9, color=colour)


def panel(ax, mesh: Mesh, title: str, labels: list[str]):
    for row in range(mesh.replicate):
        base = PITCH * (mesh.replicate - 1 - row)
        for shard in range(mesh.shard):
            number = int(mesh.grid[0, row, shard, 0, 0])
            colour = SHADES[shard] if mesh.shard == 8 else PALETTE[shard]
            rank(ax, shard, base, number, shard, mesh.shard, colour)
        group(ax, -0.15, base - 0.4, mesh.shard + 0.1, labels[row], PALETTE[0])
    ax.set_title(title, fontsize=11, color=INK, pad=10)
    ax.set_aspect("equal")
    ax.axis("off")


def draw(target: Path) -> Path:
    """Write the figure as an SVG to ``target``. The bytes are reproducible."""
    plt.rcParams |= {"svg.hashsalt": "nearlinear", "svg.fonttype": "path"}
    fig, (left, right) = plt.subplots(
        1, 2, figsize=(10, 3.9), width_ratios=[1.75, 1], layout="constrained"
    )
    gather = "every layer is gathered from all 8 ranks"
    panel(left, Mesh(shard=8), "Full sharding (ZeRO-3, FSDP)", [gather])
    left.set(xlim=(-0.4, 8.2), ylim=(-2.25, 4.35))
    labels = ["every layer is gathered from 4 ranks", ""]
    panel(right, Mesh(replicate=2, shard=4), "MiCS: shard degree 4, 2 replicas", labels)
    for shard in range(4):
        line = FancyArrowPatch(
            (shard + 0.4, PITCH - 0.5), (shard + 0.4, 1.8), arrowstyle="<->", mutation_scale=10
        )
        line.set(color=PALETTE[1], lw=1.6)
        right.add_patch(line)
    words = "replicas add up\ngradients once\nper step"
    right.text(3.95, PITCH / 2 + 0.65, words, fontsize=8, va="center", color=PALETTE[1])
    right.set(xlim=(-0.4, 5.7), ylim=(-0.6, 6.0))
    fig.savefig(target, metadata={"Date": None})
    plt.close(fig)
    return target


if __name__ == "__main__":
    print(draw(TARGET))
