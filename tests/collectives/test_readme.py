"""Settings, commands, files and public names of the collectives' README exist."""

import importlib.util
import re
from pathlib import Path

import nearlinear_collectives

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "packages" / "collectives"
README = (PACKAGE / "README.md").read_text(encoding="utf-8")
SOURCES = [
    path.read_text(encoding="utf-8")
    for suffix in ("py", "cc", "h")
    for path in (PACKAGE / "src").rglob(f"*.{suffix}")
    if "third_party" not in path.parts
]


def test_settings_table_lists_exactly_the_settings_in_the_sources():
    documented = set(re.findall(r"^\| `NEARLINEAR_COLLECTIVES_(\w+)` \|", README, re.MULTILINE))
    read = set()
    for text in SOURCES:
        read |= set(re.findall(r'\bsetting(?:_number)?\("([A-Z_]+)"', text))
        read |= set(re.findall(r'\b(?:get|environ)[(\[]\s*"NEARLINEAR_COLLECTIVES_(\w+)"', text))
    assert documented == read


def test_readme_commands_are_modules():
    modules = set(re.findall(r"python -m (nearlinear_collectives[\w.]*|ci\.[\w.]+)", README))
    assert {"ci.benchmarks.collectives", "ci.benchmarks.tables"} <= modules
    for module in modules:
        found = importlib.util.find_spec(module)
        assert found, module
        if found.submodule_search_locations:  # a package runs by its __main__
            assert importlib.util.find_spec(f"{module}.__main__"), module


def test_readme_links_exist():
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (PACKAGE / link).exists(), link


def test_readme_drawing_names_existing_files():
    (drawing,) = re.findall(r"## How it works\n\n```\n(.*?)```", README, re.DOTALL)
    folder = PACKAGE / "src" / "nearlinear_collectives"
    for name in re.findall(r"[\w/*]+\.(?:cc|h|py)\b", drawing):
        assert list(folder.glob(name)) or list(folder.glob(f"*/{name}")), name


def test_readme_public_names_exist():
    for name in re.findall(r"`nearlinear_collectives\.(\w+)\(", README):
        assert callable(getattr(nearlinear_collectives, name)), name
