"""`ci.notebooks` on small notebooks: run, check, sync, gallery and cleanup."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from ci.notebooks import __main__, gallery, pairs

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """\
# %% [markdown]
# # A *first* look
# You will draw `one` line and see $x_i = \\frac{{1}}{{2}}$.
#
# Then more.

# %% tags=["parameters"]
scale = "ci"  # ci or laptop
steps: int = 2  # number of steps

# %%
{code}
"""

PLOT = """\
import matplotlib.pyplot as plt
print("scale", scale, "steps", steps)
plt.plot([1, 2])
from nearlinear import plots
plots.show(alt='A line rises from 1 to 2.')"""


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    return folder


def add(folder: Path, stem: str, code: str = "print('hello')") -> Path:
    (folder / f"{stem}.py").write_text(SCRIPT.format(code=code))
    pairs.sync(folder, stem)
    return folder / f"{stem}.ipynb"


def command(folder: Path, *args: str) -> list[str]:
    paths = ["--notebooks", str(folder), "--output", str(folder.parent / "artifacts/notebooks")]
    return [sys.executable, "-m", "ci.notebooks", *paths, *args]


def runner(folder: Path, *args: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(folder, *args), cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def main(folder, capsys):
    """Run a command that starts no kernel, in this process: exit status, output and errors."""

    def run(*args: str) -> subprocess.CompletedProcess:
        words = command(folder, *args)[3:]
        code = __main__.main(words)
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    return run


def test_run_streams_output_and_renders_the_gallery(folder):
    add(folder, "01_first", PLOT)
    done = runner(folder, "--set", "steps=5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[01_first] scale ci steps 5" in done.stdout
    artifacts = folder.parent / "artifacts"
    index = (artifacts / "index.html").read_text()
    assert "A first look" in index and "You will draw one line" in index
    assert "run time" in index and "passed" in index and "file://" not in index
    for link in ["notebooks/01_first.html", "notebooks/01_first.ipynb", "notebooks/01_first.png"]:
        assert f'"{link}"' in index and (artifacts / link).exists()
    page = (artifacts / "notebooks/01_first.html").read_text()
    text = 'alt="A line rises from 1 to 2."'
    assert text in page and text in index
    assert "<math" in page and "<script" not in page and 'src="http' not in page
    assert (
        not nbformat.read(folder / "01_first.ipynb", 4).cells[2].outputs
    )  # the source is unchanged


@pytest.mark.parametrize(
    "code, fault",
    [
        ("", "has no alternative text"),
        ("plt.text(0, 1, 'one'); plt.text(0, 1, 'two'); plots.show(alt='A line.')",
         "'one' overlaps 'two'"),
    ],
)  # fmt: skip
def test_figure_with_a_fault_fails_the_run(folder, code, fault):
    first = "import matplotlib.pyplot as plt\nfrom nearlinear import plots\nplt.plot([1, 2])\n"
    add(folder, "01_first", first + code)
    done = runner(folder)
    assert done.returncode == 1 and fault in done.stdout


@pytest.mark.parametrize("setting, hint", [("step=5", "Did you mean 'steps'?"), ("x=1", "scale")])
def test_unknown_parameter_is_rejected_before_the_run(folder, main, setting, hint):
    add(folder, "01_first")
    done = main("--set", setting)
    assert done.returncode == 2
    assert hint in done.stderr and "01_first.ipynb" in done.stderr
    assert not (folder.parent / "artifacts").exists()


def test_failing_cell_is_reported_and_the_next_notebook_runs(folder):
    add(folder, "01_bad", "def f():\n    raise RuntimeError('on purpose')\nf()")
    add(folder, "02_good")
    done = runner(folder)
    assert done.returncode == 1
    assert "RuntimeError: on purpose" in done.stdout and "\x1b[" not in done.stdout
    assert "[02_good] hello" in done.stdout
    assert "notebooks: 1 passed, 1 failed (01_bad)" in done.stdout
    index = (folder.parent / "artifacts/index.html").read_text()
    assert "on purpose" in index and "1 failed" in index


def test_only_selects_notebooks_and_the_gallery_keeps_others(folder, main):
    add(folder, "01_first")
    add(folder, "02_second")
    runner(folder, "--only", "01")
    done = runner(folder, "--only", "02")
    assert done.returncode == 0 and "[01_first]" not in done.stdout
    assert (folder.parent / "artifacts/index.html").read_text().count("<article") == 2
    assert main("--only", "07").returncode == 2


DETACHED = """\
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print("child", child.pid)
time.sleep(600)"""


def child_pid(lines) -> int:
    return int(next(line for line in lines if "] child " in line).split()[-1])


def has_ended(pid: int, timeout: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="requires Linux to adopt orphans")
def test_timed_out_cell_leaves_no_process(folder):
    add(folder, "01_hangs", DETACHED)
    done = runner(folder, "--cell-timeout", "4")
    assert done.returncode == 1 and "CellTimeoutError" in done.stdout
    assert has_ended(child_pid(done.stdout.splitlines()))


@pytest.mark.skipif(sys.platform != "linux", reason="requires Linux to adopt orphans")
@pytest.mark.parametrize("how, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_leaves_no_process(folder, how, code):
    add(folder, "01_hangs", DETACHED)
    process = subprocess.Popen(
        command(folder),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        # a background job inherits an ignored SIGINT
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    pid = child_pid(process.stdout)
    os.kill(process.pid, how)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert has_ended(pid)


# Pairs


def test_sync_is_idempotent_and_a_change_affects_one_cell(folder):
    path = add(folder, "01_first", "print('hello')\n\n# %%\nprint('hello')\n\n# %%\n1")
    text = path.read_text()
    assert not pairs.sync(folder, "01_first") and path.read_text() == text
    ids = [cell.id for cell in nbformat.read(path, 4).cells]
    assert len(set(ids)) == len(ids)
    script = folder / "01_first.py"
    script.write_text(script.read_text().replace("# %%\n1", "# %%\n2"))
    assert pairs.sync(folder, "01_first")
    assert [cell.id for cell in nbformat.read(path, 4).cells][:-1] == ids[:-1]
    nbformat.validate(nbformat.read(path, 4))


def test_valid_pair_has_no_fault(folder, main):
    add(folder, "01_first")
    done = main("--check")
    assert done.returncode == 0 and "1 notebooks checked, 0 faults" in done.stdout


def test_sync_repairs_a_differing_pair(folder, main):
    add(folder, "01_first")
    script = folder / "01_first.py"
    script.write_text(script.read_text().replace("hello", "changed"))
    done = main("--check")
    assert done.returncode == 1
    assert "the .py and the .ipynb differ" in done.stdout and "--sync" in done.stdout
    assert main("--sync").returncode == 0
    assert main("--check").returncode == 0


def edit(path: Path, change) -> None:
    notebook = nbformat.read(path, 4)
    change(notebook)
    nbformat.write(notebook, path)


@pytest.mark.parametrize(
    "change, fault",
    [
        (
            lambda nb: nb.cells[2].outputs.append(nbformat.v4.new_output("stream", text="x")),
            "contains outputs",
        ),
        (lambda nb: nb.cells[2].update(execution_count=3), "contains execution counts"),
        (lambda nb: nb.metadata.pop("kernelspec"), "kernelspec is not python3"),
        (lambda nb: nb.cells.pop(0), "does not begin with a markdown title"),
        (lambda nb: nb.cells[1].metadata.pop("tags"), "no cell tagged `parameters`"),
        (lambda nb: nb.cells[0].update(id="other"), "cell ids or metadata"),
    ],
)
def test_each_fault_is_detected(folder, change, fault):
    path = add(folder, "01_first")
    edit(path, change)
    found = pairs.faults(folder, "01_first")
    assert any(fault in text for text, fix in found), found
    assert all(fix for text, fix in found)


@pytest.mark.parametrize("missing", ["py", "ipynb"])
def test_missing_partner_file_is_detected(folder, missing):
    add(folder, "01_first")
    (folder / f"01_first.{missing}").unlink()
    assert f"no .{missing}" in pairs.faults(folder, "01_first")[0][0]


def test_folder_without_notebooks_is_an_error(folder, main):
    done = main()
    assert done.returncode == 2 and "No notebooks" in done.stderr


def test_headline_is_the_title_and_the_first_paragraph():
    cells = [
        nbformat.v4.new_markdown_cell("# Title\n![picture](a.png)\n\nSee [the *paper*](b) now."),
        nbformat.v4.new_markdown_cell("More."),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    assert gallery.headline(notebook) == ("Title", "See the paper now.")


def test_dollars_in_code_are_not_formulas():
    page = gallery.OfflineExporter().markdown2html({"cell": {}}, "Type `$HOME` or `$PATH`: $a^2$")
    assert page.count("<math") == 1 and "$HOME" in page
