"""The README is correct: its example runs, its commands and files exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import data_prep
from ci.torch_matrix import studio
from nearlinear.config import train as train_config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def readme_folder(tmp_path_factory):
    """Folder with the README's script and its data."""
    folder = tmp_path_factory.mktemp("readme")
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (folder / "script.py").write_text(example)
    out = folder / "artifacts" / "data" / "botocore"
    data_prep.prepare(data_prep.sources.botocore(), out, max_documents=60, progress=False)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]]
)
def test_example_runs_on_one_rank_and_on_two(readme_folder, launcher):
    command = [sys.executable, *launcher, "script.py"]
    done = subprocess.run(command, cwd=readme_folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"step \d: loss ([\d.]+)", done.stdout)]
    ranks = 2 if launcher else 1
    assert len(losses) == 3 * ranks
    assert all(9 < loss < 11.5 for loss in losses)


def test_linked_files_and_folders_exist():
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link).exists(), link
    for folder in re.findall(r"^\| `(\w[\w/]*)` \|", README, re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder


def test_studio_section_equals_the_studio_check():
    page = (ROOT / "packages/core/docs/start/install.md").read_text(encoding="utf-8")
    assert f"```sh\n{studio.LINES}```" in page
    for name in ("torch", "transformers", "numpy"):
        assert studio.PACKAGES[name] in page


def test_table_lists_every_notebook():
    for notebook in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"):
        assert f"(notebooks/{notebook.name})" in README


def test_tutorial_config_equals_the_description():
    config = train_config.load(ROOT / "notebooks" / "tutorial.toml", environment={})
    assert config.run.nproc == 4 and config.parallel.hybrid_shard_degree == 2
    assert config.data.path == "artifacts/data/botocore"
    assert config.run.folder == "artifacts/tutorial"


def test_overview_figure_is_reproducible(tmp_path):
    pytest.importorskip("matplotlib")
    from ci.notebooks import overview

    drawn = overview.draw(tmp_path / "a.svg").read_text()
    assert drawn == overview.draw(tmp_path / "b.svg").read_text()
    assert drawn.count("<g id=") > 50 and (ROOT / "notebooks" / "overview.svg").exists()
