"""Write the API reference from signatures and docstrings: ``python -m ci.api_reference``.

The page ``packages/core/docs/api.md`` has a section for each public name. A test keeps it current.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import nearlinear as nl
from nearlinear.config.schema import field_docs

PAGE = Path(__file__).resolve().parents[1] / "packages/core/docs/api.md"
HEAD = """\
# API reference

Public names of `import nearlinear as nl`. `python -m ci.api_reference` writes this page from the
docstrings, and the test suite runs the examples.
"""
SECTION = re.compile(r"(Args|Returns|Raises):$")
MAX_SIGNATURE = 88  # characters on one line


def render() -> str:
    """Return the page."""
    names = sorted(nl._EXPORTS, key=str.lower)
    links = ", ".join(f"[`{name}`](#{f'nl{name}'.lower()})" for name in names)
    sections = [_section(f"nl.{name}", getattr(nl, name), "##") for name in names]
    return "\n".join([HEAD, links, "", *sections]).rstrip() + "\n"


def _section(name: str, value: Any, heading: str) -> str:
    """Return the section of a function, class or module, and of all names in a module."""
    lines = [f"{heading} {name}", ""]
    if not isinstance(value, ModuleType):
        lines += ["```python", _signature(name, value), "```", ""]
    lines += [format_docstring(inspect.getdoc(value) or ""), ""]
    if isinstance(value, ModuleType):
        members = {each: getattr(value, each) for each in _public_names(value)}
        lines += [_section(f"{name}.{each}", member, "###") for each, member in members.items()]
    elif inspect.isclass(value):
        lines += _members(value)
    return "\n".join(lines)


def _public_names(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]


def _signature(name: str, value: Any) -> str:
    """Return the call of ``value``, on one line or with one parameter per line."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
    signature = inspect.signature(value)
    if dataclasses.is_dataclass(value):
        return f"{name}(...)"  # the table of fields follows
    parameters = []
    kind = None
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and kind not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            parameters.append("*")
        kind = parameter.kind
        parameters.append(_without_quotes(str(parameter)))
    result = signature.return_annotation
    end = (
        ")"
        if result is signature.empty
        else f") -> {_without_quotes(inspect.formatannotation(result))}"
    )
    line = f"{name}({', '.join(parameters)}{end}"
    if len(line) <= MAX_SIGNATURE:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in parameters), end])


def _without_quotes(annotation: str) -> str:
    """Remove the quotes around annotations that are strings."""
    return re.sub(r"(: |^)'((?:[^'\\]|\\.)*)'", r"\1\2", annotation)


def _members(cls: type) -> list[str]:
    """Return a table of the fields of a dataclass, and a list of public methods."""
    lines = []
    if dataclasses.is_dataclass(cls):
        docs = field_docs(cls)
        lines += ["| field | default | meaning |", "|:--|:--|:--|"]
        for each in dataclasses.fields(cls):
            if not each.name.startswith("_"):
                meaning = _inline(docs.get(each.name, "")).replace("|", "\\|")
                lines.append(f"| `{each.name}` | {_default(each)} | {meaning} |")
        lines.append("")
    methods = []
    for name, member in vars(cls).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        is_method = inspect.isfunction(function) or isinstance(function, property)
        if is_method and not name.startswith("_") and function.__doc__:
            summary = _inline(" ".join(inspect.getdoc(function).split("\n\n")[0].split()))
            methods.append(f"- `{name}{'' if isinstance(function, property) else '()'}`: {summary}")
    return [*lines, *methods, ""] if methods else lines


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{getattr(field.default_factory, '__name__', 'factory')}()`"
    return "required"


def _inline(text: str) -> str:
    return text.replace("``", "`")


def format_docstring(text: str) -> str:
    """Convert a docstring to Markdown: examples to fenced code, sections to lists."""
    out: list[str] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        block = []
        if line.endswith("::") or SECTION.match(line):
            while at < len(lines) and (not lines[at] or lines[at].startswith("    ")):
                block.append(lines[at])
                at += 1
            content = textwrap.dedent("\n".join(block)).strip("\n")
            if line.endswith("::"):
                lead = line.removesuffix("::").removesuffix("Example")
                out += [
                    *([f"{_inline(lead)}:", ""] if lead else []),
                    "```python",
                    content,
                    "```",
                    "",
                ]
            else:
                out += [f"**{line}**", "", *_list(content), ""]
        else:
            out.append(_inline(line))
    return "\n".join(out).strip("\n")


def _list(content: str) -> list[str]:
    """Return the entries of a section as list items; entries start without indentation."""
    items = []
    for line in content.splitlines():
        entry = re.match(r"(\w+): (.*)", line)
        if entry:
            items.append(f"- `{entry[1]}`: {_inline(entry[2])}")
        elif line and not line.startswith(" "):
            items.append(f"- {_inline(line)}")
        else:
            items.append(_inline(line.removeprefix("  ")))
    return items


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")
