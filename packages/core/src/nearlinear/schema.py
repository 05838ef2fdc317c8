"""Strict dataclasses: from plain data to a validated config, and back to commented TOML.

A config class is a frozen dataclass whose fields are each followed by a one-line docstring.
`build` turns nested plain data (a dict, JSON, TOML) into it and refuses unknown keys, wrong types
and values outside a ``Literal`` with one line: key, value, what is allowed, the nearest known key.
`to_toml` writes a config back with those docstrings as comments.
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

from .errors import ConfigError


def build(cls, data, where: str = "", nearby=()):
    """An instance of dataclass ``cls`` from the mapping ``data``.

    ``where`` is the dotted path of ``data`` in the whole config, for messages; ``nearby`` adds
    names (aliases) to those a misspelt key is compared with. Raises ConfigError.
    """
    if not isinstance(data, typing.Mapping):
        what = where or "the config"
        raise ConfigError(f"{what} = {data!r}: expected a table of keys and values")
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
    """The error for a key nobody knows, naming the nearest known one."""
    known = sorted(known)
    close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
    place = f" in [{where}]" if where else ""
    hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
    return ConfigError(f"unknown key {key!r}{place}: {hint}")


def coerce(value, kind, key: str):
    """``value`` as type ``kind``, or a ConfigError that says what is allowed."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        for option in (o for o in options if o is not type(None)):
            try:
                return coerce(value, option, key)
            except ConfigError as error:
                refused = error
        raise refused
    if origin is typing.Literal:
        if value in options and type(value) in {type(o) for o in options}:
            return value
        allowed = ", ".join(json.dumps(o) for o in options)
        close = difflib.get_close_matches(str(value), [str(o) for o in options], n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(f"{key} = {value!r}: allowed are {allowed}{hint}")
    if dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else build(kind, value, key)
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{key} = {value!r}: expected a list")
        return origin(coerce(v, options[0], f"{key}[{i}]") for i, v in enumerate(value))
    if kind is dict or origin is dict:
        if not isinstance(value, typing.Mapping):
            raise ConfigError(f"{key} = {value!r}: expected a table of keys and values")
        of = options[1] if options else None
        return {k: coerce(v, of, f"{key}.{k}") if of else v for k, v in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is int and hasattr(value, "__index__") and not isinstance(value, bool | int):
        return operator.index(value)  # numpy's integers
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
    raise ConfigError(f"{key} = {value!r}: expected {names.get(kind, kind.__name__)}")


def read(path) -> dict:
    """The plain data of a ``.toml`` or ``.json`` file. Raises ConfigError naming file and line."""
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
    """Apply one ``a.b=value`` to nested ``data`` in place; the value is read as TOML, else text."""
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
    """The docstring under each field of ``cls``, read from its source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    docs = {}
    for statement, after in zip(body, body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
            docs[statement.target.id] = " ".join(ast.literal_eval(after.value).split())
    return docs


def to_toml(config, table: str = "") -> str:
    """``config`` as TOML with every field's docstring as a comment; `build` reads it back."""
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
    """Lines of TOML, a key and its value each; ``bare``: keys are names, and need no quotes."""
    return [f"{k if bare else _literal(k)} = {_literal(v)}" for k, v in mapping.items()]


def _literal(value) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(pairs(value)) + "}"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
