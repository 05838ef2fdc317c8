"""Types: declared for all public names; pyright reports no errors but those of a user."""

import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AREAS = ("packages/core/src", "packages/collectives/src", "data_prep")
LONGEST_LIST = 40


USER_SCRIPT = """\
import nearlinear as nl

model = nl.shard(nl.plan)  # wrong argument
nl.accumulat  # misspelled
reveal_type(nl.process_group("shard"))
"""


def public_names(package: str = "nearlinear") -> set[str]:
    """Return where the public names of a package are defined, as in nearlinear.fsdp.shard.shard."""
    init = ROOT / AREAS[0] / package.replace(".", "/") / "__init__.py"
    for node in ast.parse(init.read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exports = [(each.module, each.names[0].name) for each in node.body]
            found = {f"{package}.{module}.{name}" for module, name in exports if module}
            for module in (name for module, name in exports if not module):
                is_package = (init.parent / module).is_dir()
                found |= (
                    public_names(f"{package}.{module}") if is_package else {f"{package}.{module}"}
                )
            return found
    raise AssertionError(f"{init} has no static exports")


SPECIAL = ("__init__", "__call__", "__enter__", "__exit__", "__iter__", "__len__", "__getitem__")


def undeclared(node: ast.AST, name: str) -> list[str]:
    """Return the parameters and results of a definition that have no annotation."""
    if isinstance(node, ast.ClassDef):
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        public = [m for m in methods if not m.name.startswith("_") or m.name in SPECIAL]
        return [text for m in public for text in undeclared(m, f"{name}.{m.name}")]
    if not isinstance(node, ast.FunctionDef):
        return []
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    if positional and positional[0].arg in ("self", "cls"):
        positional = positional[1:]
    parameters = [*positional, *given.kwonlyargs, given.vararg, given.kwarg]
    missing = [f"{name}({p.arg})" for p in parameters if p and p.annotation is None]
    return missing + ([] if node.returns or node.name == "__init__" else [f"{name} -> ?"])


def definition(name: str) -> ast.AST | None:
    """Return the class or function of a public name, or None for a module."""
    module, _, last = name.rpartition(".")
    path = ROOT / AREAS[0] / f"{module.replace('.', '/')}.py"
    body = ast.parse(path.read_text()).body if path.exists() else []
    found = [node for node in body if getattr(node, "name", "") == last]
    assert found or not path.exists(), name
    return found[0] if found else None


def test_types_of_public_names_are_declared():
    """No parameter or result of a public name is left for a type checker to infer."""
    names = public_names()
    definitions = {name: definition(name) for name in names}
    assert sum(node is not None for node in definitions.values()) > 25
    missing = [text for name, node in definitions.items() for text in undeclared(node, name)]
    assert not missing, "\n".join(missing)
    sample = ast.parse("class A:\n    def __init__(self, a, *b: int): ...\n    def f(self): ...")
    assert undeclared(sample.body[0], "A") == ["A.__init__(a)", "A.f -> ?"]


@pytest.mark.slow
def test_pyright_reports_no_errors_but_those_of_a_user(tmp_path):
    """One run over the sources and over a script that misuses the public API."""
    script = tmp_path / "user.py"
    script.write_text(USER_SCRIPT)
    command = [sys.executable, "-m", "basedpyright", "--level", "error", "--outputjson"]
    done = subprocess.run(
        [*command, "--pythonpath", sys.executable, *AREAS, str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout, f"basedpyright did not run: {done.stderr}"
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] > 100
    errors = {area: [] for area in AREAS}
    of_user = [found for found in report["generalDiagnostics"] if found["file"] == str(script)]
    rules = {found["range"]["start"]["line"]: found["rule"] for found in of_user if "rule" in found}
    assert rules == {2: "reportArgumentType", 3: "reportAttributeAccessIssue"}
    for found in report["generalDiagnostics"]:
        if found in of_user:
            continue
        path = Path(found["file"]).relative_to(ROOT).as_posix()
        if found["severity"] == "error":
            area = next(area for area in AREAS if path.startswith(f"{area}/"))
            line, message = found["range"]["start"]["line"] + 1, found["message"].splitlines()[0]
            errors[area].append(f"{path}:{line}: {message} ({found.get('rule', 'syntax')})")
    for area, messages in errors.items():
        by_file = Counter(message.split(":")[0] for message in messages)
        worst = "\n".join(f"  {count:4} {path}" for path, count in by_file.most_common(10))
        listed = "\n".join(messages[:LONGEST_LIST])
        assert not messages, (
            f"{area}: {len(messages)} type errors. "
            f"List them with: basedpyright --level error {area}\n{worst}\n{listed}"
        )
