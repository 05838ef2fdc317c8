"""Print the color differences and contrasts of figures and pages: ``python -m ci.colors``.

Differences are CIEDE2000 between any two colors of the palette, as seen with normal vision and
three kinds of color blindness. Contrasts are those of WCAG 2: 4.5 for text, 3 for lines.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import numpy as np

from nearlinear import plots

VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                   [0.004733, 0.691367, 0.303900]],
}  # fmt: skip
"""Maps of linear RGB. Source: Machado, Oliveira and Fernandes 2009, severity 1."""
PAGES = ("light", "dark")
FIGURE = "#ffffff"
"""Background of figures, on light and dark pages alike."""
LUMINANCE = (0.2126, 0.7152, 0.0722)


def linear_rgb(color: str) -> np.ndarray:
    """Return the linear RGB of ``#rgb`` or ``#rrggbb``."""
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    values = np.array([int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of WCAG 2."""
    dark, light = sorted(float(linear_rgb(color) @ LUMINANCE) for color in (first, second))
    return (light + 0.05) / (dark + 0.05)


def cielab(rgb: np.ndarray) -> np.ndarray:
    """Return CIE L*a*b* (D65) of linear RGB."""
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
              [0.0193339, 0.1191920, 0.9503041]]  # fmt: skip
    xyz = np.array(to_xyz) @ np.clip(rgb, 0, 1) / [0.95047, 1.0, 1.08883]
    x, y, z = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def difference(first: np.ndarray, second: np.ndarray) -> float:
    """Return CIEDE2000 of two colors in CIE L*a*b*. Source: Sharma, Wu and Dalal 2005."""
    (l1, a1, b1), (l2, a2, b2) = first, second
    mean_chroma = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    stretch = 1.5 - 0.5 * np.sqrt(mean_chroma**7 / (mean_chroma**7 + 25**7))
    c1, c2 = np.hypot(stretch * a1, b1), np.hypot(stretch * a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, stretch * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    hue = (h1 + turn / 2) % 360 if c1 * c2 else h1 + h2
    lightness, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    dl, dc = l2 - l1, c2 - c1
    dh = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2))
    waves = ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.20, 4, -63))
    t = 1 + sum(size * np.cos(np.radians(n * hue + phase)) for size, n, phase in waves)
    sl = 1 + 0.015 * (lightness - 50) ** 2 / np.sqrt(20 + (lightness - 50) ** 2)
    sc, sh = 1 + 0.045 * chroma, 1 + 0.015 * chroma * t
    rotation = 60 * np.exp(-(((hue - 275) / 25) ** 2))
    rt = -2 * np.sqrt(chroma**7 / (chroma**7 + 25**7)) * np.sin(np.radians(rotation))
    l, c, h = dl / sl, dc / sc, dh / sh  # noqa: E741
    return float(np.sqrt(l * l + c * c + h * h + rt * c * h))


def closest(palette: Sequence[str], vision: str) -> tuple[float, str, str]:
    """Return the smallest difference of two colors for a kind of vision, and the two colors."""
    seen = {
        color: cielab(np.clip(np.array(VISION[vision]) @ linear_rgb(color), 0, 1))
        for color in palette
    }
    return min((difference(seen[a], seen[b]), a, b) for a, b in itertools.combinations(seen, 2))


def pairs(page: str) -> dict[str, tuple[str, str]]:
    """Return the texts of the gallery with their color and background on a light or dark page."""
    from ci.notebooks.gallery import PAGE

    light, dark = re.findall(r":root \{\{(.*?)\}\}", PAGE, re.DOTALL)
    found = dict(re.findall(r"--(\w+): (#\w+)", light if page == "light" else dark))
    inks = ("ink", "dim", "link", "good", "bad")
    return {f"{ink} on {area}": (found[ink], found[area]) for ink in inks
            for area in ("page", "card")}  # fmt: skip


def main() -> None:
    print("smallest CIEDE2000 between two colors of the palette")
    for vision in VISION:
        print("  {:<14}{:5.1f}  {} {}".format(vision, *closest(plots.PALETTE, vision)))
    print(f"contrast with the background of figures, {FIGURE} (lines: at least 3)")
    for color in plots.PALETTE:
        use = "lines and areas" if color in plots.LINES else "areas only"
        print(f"  {color}  {contrast(color, FIGURE):5.2f}  {use}")
    for name, color in (("labels", plots.INK), ("notes", plots.MUTED)):
        print(f"  {name:<9}{contrast(color, FIGURE):5.2f}  text: at least 4.5")
    for page in PAGES:
        print(f"contrast of text of the gallery, {page} page (at least 4.5)")
        for name, (ink, background) in pairs(page).items():
            print(f"  {name:<14}{contrast(ink, background):5.2f}")


if __name__ == "__main__":
    main()
