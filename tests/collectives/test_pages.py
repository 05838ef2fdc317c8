"""Settings, commands, files and public names of the pages on the collectives exist."""

import importlib.util
import re
from pathlib import Path

import nearlinear_collectives

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "packages" / "collectives"
DOCS = ROOT / "packages" / "core" / "docs"
PAGES = [
    DOCS / "howto" / "collectives.md",
    DOCS / "howto" / "debug_hang.md",
    DOCS / "concepts" / "hierarchical_gather.md",
    DOCS / "evidence" / "collectives.md",
]
TEXT = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
SOURCES = [
    path.read_text(encoding="utf-8")
    for suffix in ("py", "cc", "h")
    for path in (PACKAGE / "src").rglob(f"*.{suffix}")
    if "third_party" not in path.parts
]


def test_settings_table_lists_exactly_the_settings_in_the_sources():
    documented = set(re.findall(r"^\| `NEARLINEAR_COLLECTIVES_(\w+)` \|", TEXT, re.MULTILINE))
    read = set()
    for text in SOURCES:
        read |= set(re.findall(r'\bsetting(?:_number)?\("([A-Z_]+)"', text))
        read |= set(re.findall(r'\b(?:get|environ)[(\[]\s*"NEARLINEAR_COLLECTIVES_(\w+)"', text))
    assert documented == read


def test_commands_are_modules():
    modules = set(re.findall(r"python -m (nearlinear_collectives[\w.]*|ci\.[\w.]+)", TEXT))
    assert {"ci.benchmarks.collectives", "ci.benchmarks.tables"} <= modules
    for module in modules:
        found = importlib.util.find_spec(module)
        assert found, module
        if found.submodule_search_locations:  # a package runs by its __main__
            assert importlib.util.find_spec(f"{module}.__main__"), module


def test_drawing_names_existing_files():
    (drawing,) = re.findall(r"## The collectives backend\n\n```\n(.*?)```", TEXT, re.DOTALL)
    folder = PACKAGE / "src" / "nearlinear_collectives"
    for name in re.findall(r"[\w/*]+\.(?:cc|h|py)\b", drawing):
        assert list(folder.glob(name)) or list(folder.glob(f"*/{name}")), name


def test_public_names_exist():
    for name in re.findall(r"`nearlinear_collectives\.(\w+)\(", TEXT):
        assert callable(getattr(nearlinear_collectives, name)), name
