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
import operator
import textwrap
import tomllib
import types
import typing
from functools import cache
from pathlib import Path

from ..errors import ConfigError


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
        raise ConfigError(f"{path} = {data!r}: expected a table of keys and values")
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


def unknown_key(key, where: str, known) -> ConfigError:
    """Build the error for an unknown key, with the nearest known key."""
    known = sorted(known)
    close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
    place = f" in [{where}]" if where else ""
    hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
    return ConfigError(f"unknown key {key!r}{place}: {hint}")


def coerce(value: typing.Any, kind: typing.Any, key: str) -> typing.Any:
    """Convert ``value`` to type ``kind``; ConfigError with the allowed values if impossible."""
    if kind is typing.Any:
        return value
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        refusals = []
        for option in (o for o in options if o is not type(None)):
            try:
                return coerce(value, option, key)
            except ConfigError as error:
                refusals.append(error)
        raise refusals[-1]
    if origin is typing.Literal:
        if value in options and type(value) in {type(o) for o in options}:
            return value
        allowed = ", ".join(json.dumps(o) for o in options)
        close = difflib.get_close_matches(str(value), [str(o) for o in options], n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(f"{key} = {value!r}: allowed are {allowed}{hint}")
    if dataclasses.is_dataclass(kind):
        same = isinstance(value, typing.cast(type, kind))
        return value if same else build(kind, value, key)
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{key} = {value!r}: expected a list")
        return origin(coerce(v, options[0], f"{key}[{i}]") for i, v in enumerate(value))
    if kind is dict or origin is dict:
        if not isinstance(value, typing.Mapping):
            raise ConfigError(f"{key} = {value!r}: expected a table of keys and values")
        of = options[1] if options else typing.Any
        return {k: coerce(v, of, f"{key}.{k}") for k, v in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is int and hasattr(value, "__index__") and not isinstance(value, bool | int):
        return operator.index(typing.cast(typing.SupportsIndex, value))  # numpy's integers
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
    raise ConfigError(f"{key} = {value!r}: expected {names.get(kind, kind.__name__)}")


def read(path) -> dict:
    """Read the plain data of a ``.toml`` or ``.json`` file. Raises ConfigError with its path."""
    path = Path(path)
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"{path}: a config file ends in .toml or .json")
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
    except ValueError as error:
        raise ConfigError(f"{path}: not valid {kind}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the {kind} is not a table of keys and values")
    return data


def assign(data: dict, setting: str) -> None:
    """Apply one ``a.b=value`` to nested ``data`` in place; the value is TOML, or else text."""
    key, equals, text = setting.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise ConfigError(f"--set {setting}: expected key=value, as in --set optimizer.lr=1e-3")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *tables, last = key.strip().split(".")
    for table in tables:
        data = data.setdefault(table, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {setting}: {table!r} is a value, not a table")
    data[last] = value


@cache
def field_docs(cls) -> dict[str, str]:
    """Read the docstring below each field of ``cls`` from its source."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    body, docs = definition.body, {}
    for statement, after in zip(body, body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr)):
            continue
        if isinstance(statement.target, ast.Name):
            docs[statement.target.id] = " ".join(ast.literal_eval(after.value).split())
    return docs


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
