"""The text of a row: one field of a JSON object or of a table, and what to say when it is not."""

import json

import orjson

from nearlinear.errors import DataError


def of_lines(lines: list[bytes], text_field: str) -> list[str] | None:
    """The text field of each of many lines of JSON; None when one of them is not as it should."""
    try:
        texts = [orjson.loads(line)[text_field] for line in lines]
    except (ValueError, KeyError, TypeError):
        return None
    return texts if set(map(type, texts)) == {str} else None


def of_line(line: bytes, text_field: str) -> str | None:
    """The text field of a line of JSON; None when there is something to say about the line."""
    try:
        row = orjson.loads(line)
    except ValueError:  # what orjson refuses and Python reads: a lone surrogate, NaN
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
    text = row.get(text_field) if isinstance(row, dict) else None
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
