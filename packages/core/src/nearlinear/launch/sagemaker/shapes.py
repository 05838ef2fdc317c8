"""A request held against the service's own model, as strictly as the service itself does.

boto3 ships the model: members, types, enumerations, patterns, ranges. Its own check before sending
looks at names, types and minima only; the rest would come back from AWS, one fault at a time.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Iterator

from ...errors import ConfigError
from ..faults import Fault

FEW = 20  # names to list them all
NUMBERS = ("integer", "long", "float", "double")
KINDS = {"structure": dict, "map": dict, "list": list, "string": str, "boolean": bool}
WORDS = {dict: "a table", list: "a list", str: "a text", bool: "true or false"}
# Java's character classes, as the service writes its patterns, in Python's words.
CLASSES = {r"\p{Alnum}": "A-Za-z0-9", r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": r"\s"}


@functools.cache
def operation(name: str, service: str = "sagemaker"):
    """The shape of an operation's input. Raises ConfigError without boto3's models."""
    try:
        from botocore.loaders import Loader
        from botocore.model import ServiceModel
    except ImportError:
        raise ConfigError(
            'SageMaker jobs need boto3: pip install "nearlinear[sagemaker]"'
        ) from None
    model = ServiceModel(Loader().load_service_model(service, "service-2"), service)
    return model.operation_model(name).input_shape


def check(
    request: dict, name: str = "CreateTrainingJob", service: str = "sagemaker"
) -> list[Fault]:
    """Everything in ``request`` that the service's model does not allow."""
    return list(_faults(request, operation(name, service), ""))


def _faults(value, shape, where: str) -> Iterator[Fault]:
    kind = shape.type_name
    if not _is_of_kind(value, kind):
        expected = "a number" if kind in NUMBERS else WORDS[KINDS[kind]]
        yield Fault(where, f"{value!r} is not {expected}", f"write {expected}")
        return
    if kind in ("structure", "map", "list"):
        yield from {"structure": _structure, "map": _map, "list": _list}[kind](value, shape, where)
    yield from _range(value, shape, where)
    if kind == "string":
        yield from _text(value, shape, where)


def _is_of_kind(value, kind: str) -> bool:
    if kind in NUMBERS:
        allowed = (int, float) if kind in ("float", "double") else int
        return isinstance(value, allowed) and not isinstance(value, bool)
    return isinstance(value, KINDS[kind])


def _structure(value: dict, shape, where: str) -> Iterator[Fault]:
    for name in shape.required_members:
        if name not in value:
            yield Fault(_path(where, name), "is missing", "give it")
    for name, inner in value.items():
        if name in shape.members:
            yield from _faults(inner, shape.members[name], _path(where, name))
        else:
            fix = _nearest(name, shape.members)
            yield Fault(_path(where, name), "is not known to the service", fix)


def _map(value: dict, shape, where: str) -> Iterator[Fault]:
    for key, inner in value.items():
        yield from _faults(key, shape.key, f"{where}[{key!r}]'s name")
        yield from _faults(inner, shape.value, f"{where}[{key!r}]")


def _list(value: list, shape, where: str) -> Iterator[Fault]:
    for index, inner in enumerate(value):
        yield from _faults(inner, shape.member, f"{where}[{index}]")


def _range(value, shape, where: str) -> Iterator[Fault]:
    """Of a number its size, of anything else its length."""
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    number = shape.type_name in NUMBERS
    size = value if number else len(value) if hasattr(value, "__len__") else None
    if size is None:
        return
    unit = {"string": " characters", "list": " entries", "map": " entries"}.get(shape.type_name, "")
    shown = f"{size}{unit}"
    if least is not None and size < least:
        yield Fault(where, f"{shown} is too little", f"at least {least}{unit}")
    if most is not None and size > most:
        yield Fault(where, f"{shown} is too much", f"at most {most}{unit}")


def _text(value: str, shape, where: str) -> Iterator[Fault]:
    if shape.enum and value not in shape.enum:
        yield Fault(where, f"{value!r} is not allowed", _nearest(value, shape.enum))
    pattern = shape.metadata.get("pattern")
    if pattern and not _compiled(pattern).fullmatch(value):
        yield Fault(where, f"{value!r} is written wrongly", f"it must match {pattern}")


def _nearest(value: str, known: Iterable[str]) -> str:
    """The fix for a name that is not among ``known``."""
    known = list(known)
    close = difflib.get_close_matches(value, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    if len(known) < FEW:
        return f"allowed are {', '.join(known)}"
    return f"it is one of {len(known)}, such as {', '.join(known[:3])}"


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


@functools.cache
def _compiled(pattern: str) -> re.Pattern:
    for theirs, ours in CLASSES.items():
        pattern = pattern.replace(theirs, ours)
    return re.compile(pattern, re.DOTALL)
