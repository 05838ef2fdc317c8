"""Documentation site: complete reference, current numbers, and a search that finds the right page.

The reference is compared with sources that the generator does not use: help texts, the printed
config, and classes at run time. Tests that build or open the site need the extra ``docs`` and a
browser.
"""

import contextlib
import importlib
import io
import pkgutil
import re
import subprocess
import sys

import nbformat
import pytest

import data_prep
import nearlinear as nl
import nearlinear_collectives
from ci import browser
from ci.docs import PAGES, ROOT, checks, reference, tutorials, twins
from ci.notebooks import sources
from nearlinear import cli
from nearlinear.config import schema, train
from nearlinear.launch.spec import JobSpec
from tests.support.browser import open_page


@pytest.fixture(scope="module")
def pages():
    return reference.pages()


# Coverage


def test_api_page_has_every_public_name():
    text = (PAGES / "api.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^## nl\.(\w+)$", text, re.MULTILINE))
    assert headings == set(nl.__all__) - {"__version__"}


def test_config_page_has_every_key_with_a_default_and_an_effect(pages):
    printed = schema.to_toml(train.load(environment={}))
    printed += "\n" + schema.to_toml(JobSpec(), "job")
    expected, table = set(), ""
    for line in printed.splitlines():
        if head := re.match(r"\[([\w.]+)\]", line):
            table = head[1]
        elif key := re.match(r"(?:# )?(\w+) = ", line):
            expected.add((table, key[1]))
    assert len(expected) > 130
    found = set()
    for name, body in re.findall(
        r"^## \[(\S+)\]$(.*?)(?=^## |\Z)", pages["reference/config.md"], re.M | re.S
    ):
        rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+) \|$", body, re.MULTILINE)
        found |= {(name, key) for key, *_ in rows}
        assert all(default and allowed and effect for _, default, allowed, effect in rows)
    assert expected <= found


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("hybrid_shard_degree", "0 (all data ranks) or more"),
        ("tensor_parallel_degree", "at least 1"),
        ("gather_dtype", "'same', 'bf16', 'fp8'"),
        ("memory_weight", "in 0 .. 1"),
        ("keep", "at least 1"),
    ],
)
def test_config_page_has_the_ranges_that_the_schema_enforces(pages, key, allowed):
    (row,) = re.findall(rf"^\| `{key}` \| .*", pages["reference/config.md"], re.MULTILINE)
    assert allowed in row


def help_of(arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        cli.main([*arguments, "--help"])
    return out.getvalue()


def commands_in_help(arguments=()):
    """Return the commands that the help of ``arguments`` lists."""
    names = re.findall(r"^    ([a-z][a-z-]*)(?:  |$)", help_of(arguments), re.MULTILINE)
    return [(*arguments, name) for name in names]


def test_command_page_has_every_command_and_option_of_the_help(pages):
    text = pages["reference/cli.md"]
    top = commands_in_help()
    assert len(top) >= 20 and ("train",) in top
    nested = [path for name in ("data", "fsx", "checkpoint") for path in commands_in_help((name,))]
    assert ("fsx", "hydrate") in nested and ("checkpoint", "verify") in nested
    for path in [*top, *nested]:
        section = re.search(
            rf"^#+ nearlinear {' '.join(path)}$(.*?)(?=^##+ |\Z)", text, re.MULTILINE | re.DOTALL
        )
        assert section, path
        options = set(re.findall(r"^  (--[\w-]+)", help_of(path), re.MULTILINE)) - {"--help"}
        assert not {option for option in options if option not in section[1]}, path


def test_error_page_has_every_error_class(pages):
    for package in (nl, data_prep, nearlinear_collectives):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__") and "test" not in module.name:
                with contextlib.suppress(ImportError):  # optional dependencies
                    importlib.import_module(module.name)

    def below(cls):
        return {cls}.union(*map(below, cls.__subclasses__()))

    classes = {cls for cls in below(nl.errors.NearlinearError) if "tests" not in cls.__module__}
    headings = set(re.findall(r"^## (\w+)$", pages["reference/errors.md"], re.MULTILINE))
    assert {cls.__name__ for cls in classes} <= headings
    assert pages["reference/errors.md"].count("**Remedy.**") == len(headings)


def test_message_page_has_messages_of_every_package(pages):
    text = pages["reference/messages.md"]
    assert "an input needs exactly one of" in text and "loss.backward()" in text
    for package in reference.SOURCES:
        assert re.search(rf"^## {package}\.", text, re.MULTILINE), package


# Numbers


def test_planner_table_equals_its_command(capsys):
    page = (PAGES / "evidence" / "planner.md").read_text(encoding="utf-8")
    (shown,) = re.findall(
        r"<!-- nearlinear plan --validate -->\n```text\n(.*?)```", page, re.DOTALL
    )
    assert cli.main(["plan", "--validate"]) == 0
    assert capsys.readouterr().out.startswith(shown)


def test_step_time_table_agrees_with_its_summary():
    page = (PAGES / "evidence" / "step_times.md").read_text(encoding="utf-8")
    rows = re.findall(r"(\d+\.\d+) +[\d.]+-[\d.]+ +(\d+\.\d+) +([+-][\d.]+)%$", page, re.MULTILINE)
    errors = sorted(abs(float(error)) for *_, error in rows)
    for measured, predicted, error in rows:
        assert 100 * (float(predicted) / float(measured) - 1) == pytest.approx(
            float(error), abs=0.2
        )
    middle = (errors[10] + errors[11]) / 2
    assert f"22 layouts: median error {middle:.1f}%, worst {errors[-1]:.1f}%" in page


# Tutorials


def test_tutorials_take_outputs_of_copies_with_the_same_code(tmp_path, monkeypatch):
    stem = "01_openwebtext_preprocessing"
    notebook = nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    code[0]["outputs"] = [nbformat.v4.new_output("stream", name="stdout", text="written")]
    notebook.metadata["papermill"] = {"parameters": {"scale": "ci"}}
    record = {"status": "passed", "sources": sources.key(ROOT / "notebooks" / f"{stem}.ipynb")}
    notebook.metadata["nearlinear"] = record
    monkeypatch.setattr(tutorials, "EXECUTED", tmp_path)
    assert stem in tutorials.stale()
    nbformat.write(notebook, tmp_path / f"{stem}.ipynb")
    assert stem not in tutorials.stale()
    monkeypatch.setattr(tutorials, "PAGES", tmp_path / "pages")
    (tmp_path / "pages" / "tutorials").mkdir(parents=True)
    tutorials.write_pages()
    page = nbformat.read(tmp_path / "pages" / "tutorials" / f"{stem}.ipynb", as_version=4)
    shown = [cell for cell in page.cells if cell.cell_type == "code"]
    assert shown[0].outputs[0].text == "written"
    code[0]["source"] += "\n# another cell"
    nbformat.write(notebook, tmp_path / f"{stem}.ipynb")
    tutorials.write_pages()
    page = nbformat.read(tmp_path / "pages" / "tutorials" / f"{stem}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in page.cells)


def test_twins_resolve_includes_and_describe_pages(tmp_path):
    names = twins.write(tmp_path)
    index = (tmp_path / "llms.txt").read_text()
    assert all(f"({name}.md)" in index for name in names if name != "index")
    assert "emulated cluster" in (tmp_path / "evidence" / "comparison.md").read_text()
    assert "```{index}" not in (tmp_path / "llms-full.txt").read_text()
    assert "{download}" not in index
    assert "](install.md): " in (tmp_path / "start" / "index.md").read_text()


def test_key_of_outputs_covers_all_modules_that_notebooks_import():
    code = "\n".join(path.read_text("utf-8") for path in (ROOT / "notebooks").glob("*.py"))
    modules = set(re.findall(r"^\s*(?:from|import) (ci\.[\w.]+)", code, re.MULTILINE))
    assert "ci.emulation" in modules
    assert not [name for name in modules if not name.replace(".", "/").startswith(sources.FOLDERS)]


# The built site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("furo", reason="the extra docs is not installed: ./run docs installs it")
    folder = tmp_path_factory.mktemp("site") / "docs"
    command = [sys.executable, "-m", "ci.docs", "--draft", "--output", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_site_is_complete_and_needs_no_network(site):
    assert checks.links_and_structure(site) == [] and checks.remote_resources(site) == []
    for page in site.rglob("*.html"):
        if page.name not in checks.IGNORED:
            assert page.with_suffix(".md").exists(), page
    assert not list(site.glob("_downloads/*/*.py"))  # links to source files are no downloads
    broken = site / "broken.html"
    broken.write_text('<html><img src="https://a/b.png"><a href="nowhere.html">x</a></html>')
    faults = " ".join(checks.links_and_structure(site) + checks.remote_resources(site))
    broken.unlink()
    assert "leads nowhere" in faults and "alternative text" in faults and "loads" in faults


@pytest.mark.slow
def test_search_finds_the_page_of_every_term_among_the_first(site, tmp_path):
    chromium = browser.find()
    if chromium is None:
        pytest.skip(browser.MISSING)
    with open_page(chromium, tmp_path, (1200, 900)) as page:
        assert list(checks.wrong_answers(checks.walk(page, site))) == []
