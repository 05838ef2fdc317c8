"""Rows of text in aligned columns, as reports print them."""


def table(rows: list[tuple], left: tuple[int, ...] = (0,)) -> list[str]:
    """A line for each of ``rows``: columns ``left`` are aligned to the left, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = zip(row, widths, range(len(row)), strict=True)
        padded = [c.ljust(w) if i in left else c.rjust(w) for c, w, i in cells]
        lines.append("  " + "  ".join(padded).rstrip())
    return lines
