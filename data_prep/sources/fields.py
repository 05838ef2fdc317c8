"""The text of a row: one field of a JSON object or of a table, and what to say when it is not."""

import json

import msgspec
import numpy as np

from nearlinear.errors import DataError

_NEW_LINE, _OPENING, _CLOSING = b"\n{}"


class TextField:
    """Reads one field of JSON objects, a line each; of the others only that they are JSON."""

    def __init__(self, name: str):
        self.name = name
        row = msgspec.defstruct("Row", [("text", str)], rename={"text": name}, gc=False)
        self._decoder = msgspec.json.Decoder(row)

    def of_lines(self, lines: bytes) -> list[str] | None:
        """The texts of whole lines; None when a line is not one object that has the field.

        The decoder would let an object go over several lines, and several stand in one. Where all
        lines begin with `{`, and end with `}` where another follows, no object goes on over an end:
        as many objects as lines are one in each.
        """
        raw = np.frombuffer(lines, np.uint8)
        ends = np.flatnonzero(raw == _NEW_LINE)
        count = len(ends) + (not lines.endswith(b"\n"))
        between = ends[: count - 1]
        begin, end = raw[between + 1] == _OPENING, raw[between - 1] == _CLOSING
        if not (lines.startswith(b"{") and begin.all() and end.all()):
            return None
        try:
            rows = self._decoder.decode_lines(lines)
        except (ValueError, RecursionError):
            return None
        return [row.text for row in rows] if len(rows) == count else None

    def of_line(self, line: bytes) -> str | None:
        """The text of a line; None when there is something to say about it."""
        try:
            return self._decoder.decode(line).text
        except (ValueError, RecursionError):  # Python reads more: a lone surrogate, NaN
            pass
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
        text = row.get(self.name) if isinstance(row, dict) else None
        return text if isinstance(text, str) else None


def complaint(line: bytes, text_field: str, where: str) -> DataError:
    """What is wrong with a line of which `of_line` made nothing."""
    go_on = "mend the line, or pass --skip-bad-lines to leave such lines out"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return DataError(f"{where} is not JSON ({error}): {go_on}")
    if not isinstance(row, dict):
        return DataError(f"{where} is JSON but not an object: {go_on}")
    try:
        of_row(row, text_field, where, f"; {go_on}")
    except DataError as error:
        return error
    raise AssertionError(f"{where} is as it should be")


def of_row(row: dict, text_field: str, where: str, go_on: str = "") -> str:
    """The text field of a row. Raises `DataError` when there is none, or no text in it."""
    if text_field not in row:
        raise DataError(
            f"{where} has no field {text_field!r}, it has {', '.join(map(repr, row)) or 'none'}: "
            f"name one with --text-field{go_on}"
        )
    if not isinstance(row[text_field], str):
        kind = type(row[text_field]).__name__
        raise DataError(
            f"{where} has a {kind} in {text_field!r}, not text: name another field with "
            f"--text-field{go_on}"
        )
    return row[text_field]
