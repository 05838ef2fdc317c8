"""The notebooks are well-formed and run from top to bottom at scale ci.

nbval runs each notebook in a new kernel with default parameters (`scale = "ci"`); a cell fails if
it raises. The repository stores no outputs. A notebook with cells marked ``# NBVAL_CHECK_OUTPUT``
is therefore executed first, up to its last marked cell, and nbval compares the marked cells with
the outputs of that run.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest

from ci.notebooks import ROOT, __main__, execute

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
MARK = "NBVAL_CHECK_OUTPUT"
LONGEST_CELL, LONGEST_NOTEBOOK = 180, 900  # seconds; timeouts, not limits of speed


def test_notebooks_exist():
    assert NOTEBOOKS


def test_notebooks_are_well_formed(capsys):
    code = __main__.main(["--check"])
    assert code == 0, capsys.readouterr()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_default_scale_is_ci(path):
    assert papermill.inspect_notebook(str(path))["scale"]["default"].strip("'\"") == "ci"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    marked = [n for n, cell in enumerate(notebook.cells) if MARK in cell.source]
    if marked:
        notebook.cells, rest = notebook.cells[: marked[-1] + 1], notebook.cells[marked[-1] + 1 :]
        path = tmp_path / path.name
        nbformat.write(notebook, path)
        first = execute.run(path, path, {"scale": "ci"}, LONGEST_CELL)
        assert first.error is None, first.error
        notebook = nbformat.read(path, as_version=4)
        notebook.cells += rest
        nbformat.write(notebook, path)
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    options = ["-q", "--nbval-lax", "--nbval-current-env", "-p", "no:cacheprovider"]
    timeout = f"--nbval-cell-timeout={LONGEST_CELL}"
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, timeout, str(path)],
        cwd=FOLDER,
        env={**os.environ, "PYTHONPATH": python_path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LONGEST_NOTEBOOK)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    assert process.returncode == 0, output
