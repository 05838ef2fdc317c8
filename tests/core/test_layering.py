"""The house: every module imports only from floors below, and the front door is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nearlinear

SOURCE = Path(nearlinear.__file__).parent
FLOORS = {
    "ground": ("_torch", "c10d_names", "errors", "orphan", "storage"),
    "wish": ("config", "config_words", "moe", "schema"),
    "place": ("backends", "counts", "leaving", "mesh", "runtime", "spmd", "watchdog"),
    "techniques": ("parallel",),
    "state": ("checkpoint", "data", "memory"),
    "loop": ("train",),
    "doors": (
        "cli",
        "columns",
        "environment",
        "launch",
        "outputs",
        "plan",
        "plots",
        "tune",
        "watch",
    ),
}
HEIGHT = {name: height for height, names in enumerate(FLOORS.values()) for name in names}
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def imported_rooms(path: Path) -> set[str]:
    """Names directly under ``nearlinear`` that the file at ``path`` imports, wherever it does."""
    package = path.relative_to(SOURCE.parent).with_suffix("").parts[:-1]
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            names = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("nearlinear.")}
    return rooms - {"__version__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_downwards(path):
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert own in HEIGHT, f"give {own} a floor"
    for room in imported_rooms(path) - {own}:
        assert HEIGHT[room] <= HEIGHT[own], f"{path.name} on floor {own} imports {room} above it"


def test_private_torch_names_are_imported_in_one_place():
    for path in MODULES:
        if path.parent == SOURCE / "_torch":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [node.module, *(alias.name for alias in node.names)]
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("torch")]
            private = [n for n in names if any(part.startswith("_") for part in n.split("."))]
            assert not private, f"{path}: {private}"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import nearlinear", "torch transformers datasets matplotlib sagemaker"),
        ("import nearlinear.cli", "torch transformers datasets matplotlib sagemaker rich"),
        ("import nearlinear.train.preflight", "torch transformers datasets matplotlib"),
        (
            "import nearlinear as nl; nl.shard, nl.accumulate, nl.Trainer, nl.spmd",
            "transformers datasets matplotlib sagemaker",
        ),
    ],
)
def test_importing_is_light(statement, absent):
    check = f"import sys; {statement}; print([m for m in {absent.split()} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stdout + found.stderr


def test_every_public_name_resolves():
    for name in nearlinear.__all__:
        assert getattr(nearlinear, name) is not None
    assert set(nearlinear.__all__) <= set(dir(nearlinear))
    with pytest.raises(AttributeError, match="no_such_name"):
        nearlinear.no_such_name  # noqa: B018
