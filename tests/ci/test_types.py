"""pyright: no errors, an error for a misspelled public name, and declared types of all of them."""

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AREAS = ("packages/core/src", "packages/core/compat/src", "packages/collectives/src", "data_prep")
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


@pytest.mark.slow
def test_types_of_public_names_are_declared():
    """No parameter, result or attribute of a public name is left for a type checker to infer."""
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--verifytypes", "nearlinear", "--ignoreexternal",
         "--outputjson", "--pythonpath", sys.executable],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "packages/core/src")},
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.stdout, f"basedpyright did not run: {done.stderr}"
    names, checked, messages = public_names(), 0, []
    for symbol in json.loads(done.stdout)["typeCompleteness"]["symbols"]:
        if any(symbol["name"] == name or symbol["name"].startswith(f"{name}.") for name in names):
            checked += 1
            if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]:
                reasons = "; ".join(each["message"] for each in symbol["diagnostics"])
                messages.append(f"{symbol['name']}: {reasons or 'see the types it refers to'}")
    assert checked > len(names) > 30
    assert not messages, "\n".join(messages)


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
