"""Key of all sources that the outputs of a notebook depend on."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import nbformat

from ci.notebooks import ROOT

FOLDERS = (
    "packages/core/src",
    "packages/collectives/src",
    "data_prep",
    "ci/benchmarks",
    "ci/emulation",
)
"""Folders of Python code that notebooks import."""
SUFFIXES = (".py", ".cc", ".h", ".toml", ".csv")


def key(notebook: Path) -> str:
    """Return a hash of the notebook's code cells and of the libraries' sources."""
    digest = hashlib.sha256(_libraries().encode())
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "code":
            digest.update(cell.source.encode() + b"\0")
    return digest.hexdigest()


@cache
def _libraries() -> str:
    digest = hashlib.sha256()
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    for path in sorted([*files, *(ROOT / "notebooks").glob("*.toml")]):
        if path.suffix in SUFFIXES and path.is_file():
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
