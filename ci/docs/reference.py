"""Reference pages generated from schemas, parsers and sources.

`pages` returns configuration keys, commands, error classes, and error messages. The Python API is
written by `ci.api_reference`. Allowed values are read from the refusals of the schema itself: every
key is set to values that are out of range.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ci.api_reference import format_docstring
from ci.docs import ROOT
from data_prep.arguments import parser as data_parser
from nearlinear.cli.main import build_parser
from nearlinear.config import schema
from nearlinear.config.train import TrainConfig
from nearlinear.errors import ConfigError, NearlinearError
from nearlinear.launch.spec import JobInput, JobSpec

SOURCES = {
    "nearlinear": ROOT / "packages/core/src/nearlinear",
    "nearlinear_collectives": ROOT / "packages/collectives/src/nearlinear_collectives",
    "data_prep": ROOT / "data_prep",
}
PROBES = {
    int: (-(10**9), 10**18),
    float: (-1e9, 1e15),
    str: ("no such value",),
}
"""Values outside of most ranges, by type."""
ALLOWED = re.compile(r"= .*?: (?:must be |allowed are )(?P<range>[^;\n]+?)(?: \(did you.*)?$")
OPEN_END = 1e6
"""Upper limits above this one only keep numbers exact and are left out."""

REMEDIES = {
    "NearlinearError": "Read the message: it names the cause and the remedy.",
    "Interrupted": "Start the same command again. The run resumes from the state that it saved.",
    "ConfigError": "Change the key that the message names to one of the values that it lists.",
    "DataError": "Check the path, or prepare the data again: `nearlinear data verify FOLDER`.",
    "CheckpointError": "Free space, correct the folder, or use the checkpoint of this run.",
    "CheckpointDamaged": "Resume from an older checkpoint: `nearlinear checkpoint verify FOLDER`.",
    "StorageError": "Create the folder or bucket, or correct credentials and permissions.",
    "StorageUnreachable": "Check network and endpoint; the run never falls back to older data.",
    "RankFailure": "Read the log of the rank that the message names, then start the run again.",
    "RankError": "Correct the exception of the rank that the message names.",
    "TooManyBadSteps": "Lower the learning rate, check the data, or raise "
    "`train.bad_steps_in_a_row`.",
    "ReplicasDiverged": 'Exchange the named machine, or set `train.on_divergence = "replay"`.',
    "TwinError": 'Set `train.self_check = "off"` if the twin cannot be built, and compare with '
    "one process yourself.",
    "MissingAttribute": "Pass the batch in the form that the message describes.",
    "NoSplit": "Prepare the data with a split of that name: `--val-fraction`.",
    "CacheFull": "Raise `data.cache_gib`, or set `data.cache` to a larger disk.",
    "NoTargets": "Give every step at least one label that is not -100.",
    "AWSError": "Correct credentials, region or permissions: `nearlinear policies run.toml`.",
    "InvalidJob": "Correct every key that the message lists in the table `[job]`.",
    "RankUnreachable": "Read the log of the rank that the message names.",
    "BuildError": "Install a C++ compiler, or set `NEARLINEAR_COLLECTIVES_GLUE=python`.",
    "LockBusyError": "Wait for the other preparation of the same folder, or end it.",
    "UnusableTextError": "Correct the document that the message names, or filter it.",
}
"""Remedy by error class."""


def pages() -> dict[str, str]:
    """Return the generated pages by name."""
    return {name: page() for name, page in PAGES.items()}


# ---- configuration keys ---------------------------------------------------------------------


def config_page() -> str:
    lines = [
        "# Configuration",
        "",
        "Keys of a config file (TOML or JSON), by table. `nearlinear train --print-config` prints "
        "the same keys with the values of a config, `--set table.key=value` changes one, and "
        "unknown keys are errors that name the nearest key. The keys of `[parallel]` are also "
        "those of `nl.init`.",
        "",
    ]
    for name, cls, build in tables():
        keys = [f"{name}.{field.name}" for field in dataclasses.fields(cls)]
        keys += [field.name for field in dataclasses.fields(cls)] if name == "parallel" else []
        lines += [f"## [{name}]", "", *_index(keys)]
        lines += [(inspect.getdoc(cls) or "").split("\n\n")[0].replace("``", "`"), ""]
        lines += ["| key | default | allowed | effect |", "|:--|:--|:--|:--|"]
        docs, hints = schema.field_docs(cls), get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if dataclasses.is_dataclass(hints[field.name]):
                continue
            allowed = _allowed(field.name, hints[field.name], build)
            cells = (f"`{field.name}`", _default(field), allowed, docs.get(field.name, ""))
            lines.append("| " + " | ".join(_cell(text) for text in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def tables() -> Iterator[tuple[str, type, Callable[[str, Any], Any]]]:
    """Yield name, class, and a function that sets one key, for every table of a config."""
    for field in dataclasses.fields(TrainConfig):
        cls = get_type_hints(TrainConfig)[field.name]

        def build(key: str, value: Any, table: str = field.name) -> Any:
            return schema.build(TrainConfig, {table: {key: value}})

        yield field.name, cls, build
    yield "job", JobSpec, lambda key, value: schema.build(JobSpec, {key: value}, "job")
    yield (
        "job.inputs.NAME",
        JobInput,
        lambda key, value: schema.build(JobInput, {"path": "/tokens"} | {key: value}, "inputs"),
    )


def _allowed(key: str, kind: Any, build: Callable[[str, Any], Any]) -> str:
    """Return the allowed values of a key, from its type and the refusals of the schema."""
    options = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{option}`" for option in options)
    if get_origin(kind) in (Union, type(int | None)):
        kind = next(option for option in options if option is not type(None))
        return _allowed(key, kind, build) + ", or unset"
    if kind is bool:
        return "`true`, `false`"
    found = []
    for probe in PROBES.get(kind, ()):
        try:
            build(key, probe)
        except ConfigError as error:
            match = ALLOWED.search(str(error)) if key in str(error) else None
            if match and not _is_open(match["range"]):
                found.append(match["range"])
        except (NearlinearError, OSError):
            continue
    names = {int: "integer", float: "number", str: "text"}
    return ", ".join([names.get(kind, _type_name(kind)), *dict.fromkeys(found)])


def _is_open(text: str) -> bool:
    limit = re.fullmatch(r"at most ([\d.e+^]+)", text)
    return bool(limit) and ("^" in limit[1] or float(limit[1]) > OPEN_END)


def _type_name(kind: Any) -> str:
    origin = get_origin(kind) or kind
    return {list: "list", tuple: "list", dict: "table"}.get(origin, getattr(origin, "__name__", ""))


def _default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING:
        factory = field.default_factory
        value = "" if factory is dataclasses.MISSING else factory()
        return f"`{schema._literal(value)}`"
    if field.default is None:
        return "unset"
    return f"`{schema._literal(field.default)}`"


def _cell(text: str) -> str:
    """Return text for a cell of a table."""
    text = " ".join(text.split()).replace("``", "`").replace("|", "\\|")
    return text if "`" in text else re.sub(r"([<>*_\[\]])", r"\\\1", text)


def _index(names: Iterable[str]) -> list[str]:
    """Return main entries of the index (`!`), which the site's search finds first."""
    return ["```{index} " + ", ".join(f"!{name}" for name in names), "```", ""]


# ---- commands -------------------------------------------------------------------------------


def cli_page() -> str:
    lines = [
        "# Commands",
        "",
        "Every command of `nearlinear` with its options, from its own parser. The repository's "
        "`./run` is at the end. Exit codes: 0 for success, 1 if a rank failed, a plan does not fit "
        "or a launch was declined, 2 for an error that the user can act on, 130 and 143 after "
        "Ctrl-C and SIGTERM.",
        "",
    ]
    for path, parser in commands():
        lines += [f"{'#' * len(path)} {' '.join(path)}", ""]
        lines += _index([" ".join(path)])
        lines += _command(parser)
    run = subprocess.run([sys.executable, ROOT / "run", "help"], capture_output=True, text=True)
    return "\n".join([*lines, "## ./run", "", "```text", run.stdout.rstrip(), "```", ""])


def commands() -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yield name and parser of every command, subcommands after their parent."""
    root = build_parser()
    for name, parser in _subparsers(root).items():
        yield from _walk(("nearlinear", name), data_parser() if name == "data" else parser)


def _walk(path: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator:
    yield path, parser
    for name, below in _subparsers(parser).items():
        yield from _walk((*path, name), below)


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _command(parser: argparse.ArgumentParser) -> list[str]:
    words = " ".join(parser.format_usage().removeprefix("usage: ").split())
    usage = textwrap.fill(words, 80, subsequent_indent="    ", break_on_hyphens=False)
    about = parser.description or ""
    lines = [_prose(about), "", "```text", usage, "```", ""]
    rows = []
    for action in parser._actions:
        if action.help is argparse.SUPPRESS or isinstance(
            action, argparse._HelpAction | argparse._SubParsersAction
        ):
            continue
        name = _argument_name(action)
        default = action.default
        shown = "" if default in (None, False, argparse.SUPPRESS, [], "") else f"`{default}`"
        meaning = _expanded(action, parser)
        code = name.replace("|", "\\|")
        rows.append(f"| `{code}` | {shown} | {_cell(meaning)} |")
    if rows:
        lines += ["| argument | default | meaning |", "|:--|:--|:--|"]
        lines += [*rows, ""]
    if parser.epilog:
        lines += ["```text", inspect.cleandoc(parser.epilog), "```", ""]
    return lines


def _argument_name(action: argparse.Action) -> str:
    """Return the flags of an option with its value, or the name of a positional argument."""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    value = action.metavar or choices or action.dest.upper()
    value = value if isinstance(value, str) else " ".join(value)
    if not action.option_strings:
        return action.metavar if isinstance(action.metavar, str) else choices or action.dest
    return ", ".join(action.option_strings) + (f" {value}" if action.nargs != 0 else "")


def _expanded(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    text = action.help or ""
    values = {**vars(action), "prog": parser.prog}
    try:
        return " ".join((text % values).split())
    except (TypeError, ValueError, KeyError):
        return " ".join(text.split())


def _prose(text: str) -> str:
    """Escape characters that Markdown would interpret."""
    return re.sub(r"([<>*_\[\]])", r"\\\1", text)


# ---- errors ---------------------------------------------------------------------------------


def error_classes() -> list[type]:
    """Return all public error classes, base classes first."""
    found = []
    for name, path in _modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            if any(
                re.search(r"(Error|Exception|Failure)$", base) or base in REMEDIES for base in bases
            ):
                found.append(getattr(importlib.import_module(name), node.name))
    return sorted(found, key=lambda cls: (len(cls.__mro__), cls.__name__))


def _modules() -> Iterator[tuple[str, Path]]:
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[-1] == "__main__" or "tests" in parts or path.stem.startswith("test_"):
                continue
            name = ".".join([package, *(part for part in parts if part != "__init__")])
            yield name, path


def errors_page() -> str:
    lines = [
        "# Error classes",
        "",
        "An error that a user can act on is one line with cause and remedy. The command line "
        "prints it and ends with the exit code of its class; `--debug` adds the traceback. "
        "[All messages](messages.md) are listed on a page of their own.",
        "",
    ]
    for cls in error_classes():
        lines += [f"## {cls.__name__}", "", *_index([cls.__name__])]
        lines += [format_docstring(inspect.getdoc(cls) or ""), ""]
        facts = [f"Bases: {', '.join(f'`{base.__name__}`' for base in cls.__bases__)}."]
        facts.insert(0, f"Module: `{cls.__module__}`.")
        if isinstance(code := getattr(cls, "exit_code", None), int):
            facts.append(f"Exit code: {code}.")
        lines += [" ".join(facts), "", f"**Remedy.** {REMEDIES[cls.__name__]}", ""]
    return "\n".join(lines)


def messages_page() -> str:
    lines = [
        "# Error messages",
        "",
        "Every message of nearlinear's error classes, by module. Values of a run are shown as "
        "`{name}`. Search for the fixed words of a message to find its source. A message states "
        "the cause first and the remedy last; [error classes](errors.md) adds the remedy by class.",
        "",
    ]
    by_module = defaultdict(list)
    for module, name, message in messages():
        by_module[module].append((name, message))
    for module, entries in by_module.items():
        lines += [f"## {module}", ""]
        lines += [
            f"- {_code(message)} ([{name}](errors.md#{name.lower()}))" for name, message in entries
        ]
        lines.append("")
    return "\n".join(lines)


def messages() -> Iterator[tuple[str, str, str]]:
    """Yield module, class and text of every error that the sources build."""
    names = {cls.__name__ for cls in error_classes()}
    for module, path in _modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in names and (text := _text(node.args[0])):
                yield module, name, text


def _text(node: ast.expr) -> str:
    """Return the text of a string expression with placeholders, or "" for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    if isinstance(node, ast.JoinedStr):
        parts = [
            part.value if isinstance(part, ast.Constant) else f"{{{_placeholder(part)}}}"
            for part in node.values
        ]
        return " ".join("".join(map(str, parts)).split())
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return " ".join(filter(None, (_text(node.left), _text(node.right))))
    return ""


def _placeholder(node: ast.expr) -> str:
    text = ast.unparse(node.value) if isinstance(node, ast.FormattedValue) else ""
    return (
        text if re.fullmatch(r"[\w.]+", text) else re.sub(r"\W+", " ", text).strip()[:30] or "value"
    )


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


PAGES: dict[str, Callable[[], str]] = {
    "reference/config.md": config_page,
    "reference/cli.md": cli_page,
    "reference/errors.md": errors_page,
    "reference/messages.md": messages_page,
}
"""Generated pages, relative to the folder of all pages."""
