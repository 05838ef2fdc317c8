"""Small changes of Python source: operators, constants, conditions, operands, and statements."""

from __future__ import annotations

import ast
import copy
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
_ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult)
_LOGGERS = ("log", "logger", "logging", "warnings")


@dataclass(frozen=True)
class Mutation:
    """Replacement of a part of a module's source."""

    kind: str
    line: int
    begin: int
    """First byte of the replaced part."""
    end: int
    before: str
    after: str
    number: int
    """Count of equal mutations before it in the module."""

    @property
    def key(self) -> str:
        """Name within the module, which changes of comments and other code leave as it is."""
        number = f" #{self.number}" if self.number else ""
        return f"{self.kind}: {self.before} -> {self.after}{number}"

    def apply(self, source: bytes) -> bytes:
        """Return the mutated source."""
        return source[: self.begin] + self.after.encode() + source[self.end :]


def sample(source: bytes, count: int, seed: str) -> list[Mutation]:
    """Return ``count`` mutations of a module, drawn with a seed, evenly over their kinds."""
    rng, by_kind = random.Random(seed), {}
    for mutation in find_mutations(source):
        by_kind.setdefault(mutation.kind, []).append(mutation)
    for listed in by_kind.values():
        rng.shuffle(listed)
    chosen: list[Mutation] = []
    while len(chosen) < count and any(by_kind.values()):
        for kind in sorted(by_kind):
            if by_kind[kind] and len(chosen) < count:
                chosen.append(by_kind[kind].pop())
    return chosen


def find_mutations(source: bytes) -> list[Mutation]:
    """Return all mutations of a module. Messages, annotations and docstrings are left out."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found, counts = [], Counter()
    for kind, node, changed in _changes(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        after = ast.unparse(changed)
        if isinstance(node, ast.expr):
            after = f"({after})"
        before = source[begin:end].decode()
        number = counts[kind, before, after]
        counts[kind, before, after] += 1
        found.append(Mutation(kind, node.lineno, begin, end, before, after, number))
    return sorted(found, key=lambda each: (each.begin, each.kind, each.after))


def code_of(source: bytes) -> str:
    """Return the statements of a module without comments, formatting and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(getattr(node, "body", None), list):
            node.body = [each for each in node.body if not _is_text(each)]
    return ast.unparse(tree)


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _changes(tree: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.AST]]:
    """Yield kind, node and replacement of every mutation below ``tree``."""
    for node in _executed(tree):
        if isinstance(node, ast.Compare):
            for at, operator in enumerate(node.ops):
                changed = copy.deepcopy(node)
                changed.ops[at] = _COMPARISONS[type(operator)]()
                yield "comparison", node, changed
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            yield "negated condition", node.test, ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.BoolOp):
            changed = copy.deepcopy(node)
            changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and/or", node, changed
        elif isinstance(node, ast.BinOp):
            if type(node.op) in _ARITHMETIC:
                changed = copy.deepcopy(node)
                changed.op = _ARITHMETIC[type(node.op)]()
                yield "operator", node, changed
            if isinstance(node.op, _ORDERED) and ast.dump(node.left) != ast.dump(node.right):
                yield "swapped operands", node, ast.BinOp(node.right, node.op, node.left)
        elif isinstance(node, ast.Constant):
            value = node.value
            if isinstance(value, bool):
                yield "constant", node, ast.Constant(not value)
            elif isinstance(value, int | float):
                yield "off by one", node, ast.Constant(value + 1)
        elif isinstance(node, ast.AugAssign | ast.Raise) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
        ):
            yield "dropped statement", node, ast.Pass()


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield nodes whose change can change results."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.Assert) or _is_typing(child) or _is_logging(child):
                continue
            yield child
            if not isinstance(child, ast.Raise):  # its arguments are messages
                yield from _executed(child)


def _is_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _is_logging(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    function = node.value.func
    return isinstance(function, ast.Attribute) and ast.unparse(function.value) in _LOGGERS
