"""Strict dataclasses: build a validated config from plain data and write it as commented TOML.

A config class is a frozen dataclass with a docstring below each field. `build` converts nested
plain data (a dict, JSON, TOML) and refuses unknown keys, wrong types and values outside of a
``Literal`` with one line: key, value, allowed values, nearest known key. `to_toml` writes a config
with the docstrings as comments.
"""

import ast
import dataclasses
import difflib
import inspect
import json
import math
import operator
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from ..errors import ConfigError

MAX_INTEGER, MAX_DEPTH = 2**62, 32
"""Limits of integers, and of the nesting of tables and lists."""
MAX_NAME_BYTES = 255
MAX_TEXT, MAX_TABLE_TEXT = 4096, 2**17
"""Characters of a text (Linux' limit of a path), and of a text in a table of free keys."""

BYTE_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

Ranges = typing.Mapping[str, tuple[float, float]]
"""Least and greatest allowed value of numbers, by dotted key."""


def parse_bytes(text: str) -> int | None:
    """Return the bytes of a size such as ``12GiB`` or ``1.5 MiB``; None for any other text."""
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(BYTE_UNITS)})", text.strip())
    return int(float(found[1]) * BYTE_UNITS[found[2]]) if found else None


def build(cls, data, where: str = "", nearby=()):
    """Build an instance of dataclass ``cls`` from the mapping ``data``.

    Args:
        cls: A config class.
        data: Nested plain data.
        where: Dotted path of ``data`` in the whole config, for messages.
        nearby: Aliases to suggest for a misspelled key, besides the field names.

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type.
    """
    if not isinstance(data, typing.Mapping):
        path = where or "the config"
        raise ConfigError(f"{path} = {shown(data)}: expected a table of keys and values")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in data.items():
        if key not in hints:
            raise unknown_key(key, where, [*hints, *nearby])
        values[key] = coerce(value, hints[key], f"{where}.{key}" if where else key)
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"missing key {(where + '.') * bool(where)}{missing[0]}: give it a value")
    return cls(**values)


def did_you_mean(value: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a question with the nearest of the ``known`` values, or "" if none is near.

    Args:
        value: A value that is not known.
        known: The known values.
        cutoff: Similarity from which a value is near, see `difflib.get_close_matches`.
    """
    close = difflib.get_close_matches(value, list(known), n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}?" if close else ""


def unknown_key(key, where: str, known) -> ConfigError:
    """Build the error for an unknown key, with the nearest known key."""
    known = sorted(known)
    place = f" in [{where}]" if where else ""
    hint = did_you_mean(str(key), known, cutoff=0.5) or f"known keys: {', '.join(known)}"
    return ConfigError(f"unknown key {shown(key)}{place}: {hint}")


def shown(value: typing.Any, limit: int = 80) -> str:
    """Return ``repr(value)`` on one line of at most ``limit`` characters, for messages."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or deep nesting
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def check_value(value: typing.Any, key: str, text_limit: int = MAX_TEXT) -> None:
    """Check plain data: finite floats, integers of 62 bits, texts without NUL, flat nesting.

    Raises:
        ConfigError: A number or text in ``value`` is outside of the limits.
    """
    if value is None or _is_plain(value, text_limit):  # most settings
        return
    pending = [(value, 0)]
    while pending:
        each, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ConfigError(f"{key[:80]}: tables and lists are nested more than {MAX_DEPTH} deep")
        if isinstance(each, float) and not math.isfinite(each):
            raise ConfigError(f"{key} = {each}: must be a finite number")
        if isinstance(each, int) and abs(each) > MAX_INTEGER:
            raise ConfigError(f"{key} = {shown(each)}: must be at most 2^62")
        if isinstance(each, str):
            _check_text(each, key, text_limit)
        elif isinstance(each, typing.Mapping):
            pending += [(part, depth + 1) for pair in each.items() for part in pair]
        elif isinstance(each, list | tuple):
            pending += [(part, depth + 1) for part in each]


def _is_plain(value: typing.Any, text_limit: int) -> bool:
    """Return True for a Boolean, a small number or a short ASCII text."""
    kind = type(value)
    if kind is str:
        return len(value) <= text_limit and value.isascii() and "\0" not in value
    if kind is float:
        return math.isfinite(value)
    return kind is bool or (kind is int and -MAX_INTEGER <= value <= MAX_INTEGER)


@cache
def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))


def _check_text(text: str, key: str, limit: int) -> None:
    if len(text) > limit:
        raise ConfigError(
            f"{key} = {shown(text)}: has {len(text)} characters, and at most {limit} are allowed"
        )
    if "\0" in text:
        raise ConfigError(f"{key} = {shown(text)}: must not contain the character NUL")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{key} = {ascii(text)[:80]}: is not Unicode text")


def check_path(path: str, key: str) -> None:
    """Raise ConfigError if a part of ``path`` is longer than the name of a file can be."""
    for part in path.split("/"):
        if len(part.encode(errors="replace")) > MAX_NAME_BYTES:
            raise ConfigError(
                f"{key} = {shown(path)}: a name in the path has {len(part)} characters, and file "
                f"systems allow {MAX_NAME_BYTES} bytes"
            )


def check_ranges(config: typing.Any, ranges: Ranges, where: str = "") -> None:
    """Check all values of a config, however it was built, and the ranges of its numbers.

    Raises:
        ConfigError: A value is not finite, too large, or outside of its range.
    """
    for name in _field_names(type(config)):
        value: typing.Any = getattr(config, name)
        if value is None or value is True or value is False:
            continue
        key = where + name
        if dataclasses.is_dataclass(value):
            check_ranges(value, ranges, f"{key}.")
            continue
        if isinstance(value, dict):
            check_value(value, key, MAX_TABLE_TEXT)
            continue
        check_value(value, key)
        if key in ranges:
            least, greatest = ranges[key]
            if value < least:
                raise ConfigError(f"{key} = {value}: must be at least {least:g}")
            if value > greatest:
                raise ConfigError(f"{key} = {value}: must be at most {greatest:g}")


def coerce(value: typing.Any, kind: typing.Any, key: str, text_limit: int = MAX_TEXT) -> typing.Any:
    """Convert ``value`` to type ``kind``; ConfigError with the allowed values if impossible."""
    if kind is typing.Any:
        check_value(value, key, text_limit)
        return value
    if not isinstance(value, (typing.Mapping, list, tuple)):  # their parts are checked one by one
        check_value(value, key, text_limit)
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        refusals = []
        for option in (o for o in options if o is not type(None)):
            try:
                return coerce(value, option, key, text_limit)
            except ConfigError as error:
                refusals.append(error)
        first, *others = map(str, refusals)
        prefix = f"{key} = {shown(value)}: "
        raise ConfigError("; ".join([first, *(each.removeprefix(prefix) for each in others)]))
    if origin is typing.Literal:
        if value in options and type(value) in {type(o) for o in options}:
            return value
        allowed = ", ".join(json.dumps(o) for o in options)
        nearest = did_you_mean(str(value), map(str, options))
        hint = f" ({nearest})" if nearest else ""
        raise ConfigError(f"{key} = {shown(value)}: allowed are {allowed}{hint}")
    if dataclasses.is_dataclass(kind):
        same = isinstance(value, typing.cast(type, kind))
        return value if same else build(kind, value, key)
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{key} = {shown(value)}: expected a list")
        return origin(coerce(v, options[0], f"{key}[{i}]") for i, v in enumerate(value))
    if kind is dict or origin is dict:
        if not isinstance(value, typing.Mapping):
            raise ConfigError(f"{key} = {shown(value)}: expected a table of keys and values")
        of = options[1] if options else typing.Any
        check_value(list(value), key)
        return {k: coerce(v, of, f"{key}.{k}", MAX_TABLE_TEXT) for k, v in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is int and hasattr(value, "__index__") and not isinstance(value, bool | int):
        return operator.index(typing.cast(typing.SupportsIndex, value))  # numpy's integers
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
    raise ConfigError(f"{key} = {shown(value)}: expected {names.get(kind, kind.__name__)}")


def read(path) -> dict:
    """Read the plain data of a ``.toml`` or ``.json`` file. Raises ConfigError with its path."""
    path = Path(path)
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"{shown(str(path), 300)}: a config file ends in .toml or .json")
    check_value(str(path), "the path of a config file")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file; check the path") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text; save it as UTF-8") from None
    kind = path.suffix[1:].upper()
    try:
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except RecursionError:
        raise ConfigError(
            f"{path}: tables and lists are nested more than {MAX_DEPTH} deep"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid {kind}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the {kind} is not a table of keys and values")
    _check_depth(data, str(path))
    return data


def _check_depth(data: typing.Any, where: str) -> None:
    """Raise ConfigError if tables and lists are nested more than `MAX_DEPTH` deep."""
    level = [data]
    for _ in range(MAX_DEPTH + 1):
        level = [
            part
            for each in level
            if isinstance(each, dict | list)
            for part in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise ConfigError(f"{where}: tables and lists are nested more than {MAX_DEPTH} deep")


def assign(data: dict, setting: str) -> None:
    """Apply one ``a.b=value`` to nested ``data`` in place; the value is TOML, or else text."""
    key, equals, text = setting.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise ConfigError(
            f"--set {shown(setting)}: expected key=value, as in --set optimizer.lr=1e-3"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    except (ValueError, RecursionError):  # an integer of thousands of digits, or deep nesting
        raise ConfigError(f"--set {shown(setting)}: the value is too large or too deep") from None
    _check_depth(value, f"--set {shown(key)}")
    if key.count(".") > MAX_DEPTH:
        raise ConfigError(f"--set {shown(key)}: tables are nested more than {MAX_DEPTH} deep")
    *tables, last = key.strip().split(".")
    for table in tables:
        data = data.setdefault(table, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {setting}: {table!r} is a value, not a table")
    data[last] = value


@cache
def field_docs(cls) -> dict[str, str]:
    """Read the docstring below each field of ``cls``, which its module defines, from its source."""
    body, docs = _classes(cls.__module__)[cls.__name__].body, {}
    for statement, after in zip(body, body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr)):
            continue
        if isinstance(statement.target, ast.Name):
            docs[statement.target.id] = " ".join(ast.literal_eval(after.value).split())
    return docs


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}


def to_toml(config, table: str = "") -> str:
    """Write ``config`` as TOML with each field's docstring as a comment; `build` reads it back."""
    docs, own, nested = field_docs(type(config)), [], []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        path = f"{table}.{f.name}" if table else f.name
        if dataclasses.is_dataclass(value):
            nested.append(to_toml(value, path))
        elif isinstance(value, dict) and any(map(dataclasses.is_dataclass, value.values())):
            nested += [to_toml(each, f"{path}.{name}") for name, each in value.items()]
        elif isinstance(value, dict):
            nested.append("\n".join([f"[{path}]  # {docs.get(f.name, '')}", *pairs(value), ""]))
        elif value is None:
            own.append(f"# {f.name} = ...  # {docs.get(f.name, '')}")
        else:
            own.append(f"{f.name} = {_literal(value)}  # {docs.get(f.name, '')}")
    head = [f"[{table}]"] if table and own else []
    return "\n".join([*head, *own, ""]) + ("\n" if own and nested else "") + "\n".join(nested)


def pairs(mapping, bare: bool = False) -> list[str]:
    """Write one line of TOML per key; ``bare``: keys are identifiers and need no quotes."""
    return [f"{k if bare else _literal(k)} = {_literal(v)}" for k, v in mapping.items()]


def _literal(value) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(pairs(value)) + "}"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
