"""Layers of the package: imports point downwards, contain no cycles and stay light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nearlinear

SOURCE = Path(nearlinear.__file__).parent
LAYERS = {
    "base": ("_torch", "errors", "output", "own_hash", "storage"),
    "settings": ("config", "hardware"),
    "ranks": ("distributed", "spmd"),
    "sharding": ("fsdp",),
    "techniques": (
        "activation",
        "context_parallel",
        "expert_parallel",
        "pipeline_parallel",
        "tensor_parallel",
        "transforms",
    ),
    "state": ("checkpoint", "data", "memory"),
    "training": ("elastic", "integrations", "train"),
    "interfaces": (
        "cli",
        "compat",
        "environment",
        "launch",
        "planner",
        "plots",
    ),
}
HEIGHT = {name: height for height, names in enumerate(LAYERS.values()) for name in names}
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def imported_packages(path: Path) -> set[str]:
    """Return top-level names of ``nearlinear`` that ``path`` imports, also inside functions."""
    package = path.relative_to(SOURCE.parent).with_suffix("").parts[:-1]
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            names = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        packages |= {name.split(".")[1] for name in names if name.startswith("nearlinear.")}
    return packages - {"__version__"}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_name(path): path for path in MODULES}


def executed_nodes(node: ast.AST):
    """Yield the nodes below ``node`` except those under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from executed_nodes(child)


def imported_modules(name: str) -> set[str]:
    """Return modules of nearlinear that module ``name`` imports, also inside functions."""
    path, found = PATHS[name], set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in executed_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{origin}.{alias.name}" for alias in node.names}
            found |= (names & PATHS.keys()) or {origin}
    return found & PATHS.keys() - {name}


def test_imports_contain_no_cycles():
    """Remove modules without remaining imports until none is left; cycles remain."""
    left = {name: imported_modules(name) for name in PATHS}
    while free := {name for name, imports in left.items() if not imports & left.keys()}:
        left = {name: imports for name, imports in left.items() if name not in free}
    assert not left, "import cycles among: " + ", ".join(sorted(left))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_to_the_same_or_lower_layers(path):
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert own in HEIGHT, f"add {own} to LAYERS"
    for name in imported_packages(path) - {own}:
        assert HEIGHT[name] <= HEIGHT[own], (
            f"{path.name} in {own} imports {name} from a higher layer"
        )


def test_classes_are_exchanged_only_where_model_state_lists_them():
    table = ast.get_docstring(ast.parse((SOURCE / "fsdp/model_state.py").read_text()))
    mixins = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("__class__"):
                assert isinstance(node.value, ast.Call), f"{path}: use mixin_class"
                mixins.append(ast.unparse(node.value.args[1]))
    assert len(mixins) <= 4 and all(name in table for name in mixins), mixins


def test_only_one_attribute_is_set_on_user_modules():
    names = {name for path in MODULES for name in re.findall(r"_nearlinear_\w+", path.read_text())}
    assert names == {"_nearlinear_state"}


def test_private_torch_names_are_imported_in_torch_shim_only():
    for path in MODULES:
        if path == SOURCE / "_torch.py":
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
