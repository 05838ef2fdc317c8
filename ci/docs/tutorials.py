"""Tutorial pages: the notebooks with the outputs of their executed copies.

`python -m ci.notebooks --scale ci` executes notebooks and records a key of their sources in each
copy. A copy with the current key is used as it is; other notebooks are executed again. The text of
a page comes from the notebook itself, so that an edit of its Markdown needs no execution.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat

from ci.docs import PAGES, REPOSITORY, ROOT
from ci.notebooks import figures, pairs, sources

NOTEBOOKS = ROOT / "notebooks"
EXECUTED = ROOT / "artifacts" / "notebooks"
GITHUB = "https://github.com/"
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#:]+)(#[^)]*)?\)")


def stale() -> list[str]:
    """Return the notebooks without a passed execution of their current sources."""
    return [stem for stem in pairs.select(NOTEBOOKS, []) if not _is_current(stem)]


def _is_current(stem: str) -> bool:
    executed = EXECUTED / f"{stem}.ipynb"
    if not executed.exists():
        return False
    metadata: Any = nbformat.read(executed, as_version=4).metadata
    record = metadata.get("nearlinear", {})
    scale = metadata.get("papermill", {}).get("parameters", {}).get("scale")
    key = sources.key(NOTEBOOKS / f"{stem}.ipynb")
    return record.get("status") == "passed" and scale == "ci" and record.get("sources") == key


def execute(stems: list[str]) -> int:
    """Execute notebooks with the notebook runner, and return its exit code."""
    only = [part for stem in stems for part in ("--only", stem)]
    return subprocess.run([sys.executable, "-m", "ci.notebooks", *only], cwd=ROOT).returncode


def write_pages() -> list[Path]:
    """Write a page for every notebook; a notebook without an executed copy has no outputs."""
    written = []
    for stem in pairs.select(NOTEBOOKS, []):
        notebook: Any = nbformat.read(NOTEBOOKS / f"{stem}.ipynb", as_version=4)
        if (EXECUTED / f"{stem}.ipynb").exists():
            _copy_outputs(nbformat.read(EXECUTED / f"{stem}.ipynb", as_version=4), notebook)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = _with_links_from_pages(cell.source)
        title, _, rest = notebook.cells[0].source.partition("\n")
        notebook.cells[0].source = f"{title}\n\n{badges(stem)}\n{rest}"
        notebook.metadata.pop("widgets", None)
        path = PAGES / "tutorials" / f"{stem}.ipynb"
        text = nbformat.writes(notebook) + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def badges(stem: str) -> str:
    """Return links that download a notebook, and open it in hosted services if they can find it."""
    found = ["{download}`Download this notebook <../../../../notebooks/" + f"{stem}.ipynb>`"]
    address = os.environ.get(REPOSITORY, "").rstrip("/")
    if address.startswith(GITHUB):
        path = f"github/{address.removeprefix(GITHUB)}/blob/main/notebooks/{stem}.ipynb"
        found.append(f"[Open in Colab](https://colab.research.google.com/{path})")
        found.append(f"[Open in Studio Lab](https://studiolab.sagemaker.aws/import/{path})")
    return " · ".join(found)


def _copy_outputs(executed: Any, notebook: Any) -> None:
    """Copy outputs cell by cell; papermill's own cells are skipped."""
    done = [
        cell
        for cell in executed.cells
        if cell.cell_type == "code" and "injected-parameters" not in cell.metadata.get("tags", [])
    ]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.source for cell in done] != [cell.source for cell in code]:
        return
    for cell, result in zip(code, done, strict=True):
        cell.outputs = [each for each in result.outputs if each.get("name") != "stderr"]
        cell.execution_count = result.execution_count
        if alt := next(filter(None, map(figures.alternative_text, cell.outputs)), ""):
            cell.metadata["mystnb"] = {"image": {"alt": alt}}  # MyST-NB reads no other place


def _with_links_from_pages(text: str) -> str:
    """Rewrite links relative to `notebooks` as links relative to the folder of the pages."""

    def moved(match: re.Match) -> str:
        target = (NOTEBOOKS / match[2]).resolve()
        if not target.exists() or match[2].endswith(".ipynb"):
            return match[0]
        if target.is_relative_to(PAGES):
            relative = "../" + str(target.relative_to(PAGES))
        else:
            relative = "../../../../" + str(target.relative_to(ROOT))
        return f"{match[1]}{relative}{match[3] or ''})"

    return LINK.sub(moved, text)
