"""What the README shows is what happens: its example runs, its commands and files exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import data_prep
from ci.torch_matrix import studio
from nearlinear.train import config as train_config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with the README's script and the data it reads."""
    folder = tmp_path_factory.mktemp("readme")
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (folder / "script.py").write_text(example)
    out = folder / "artifacts" / "data" / "botocore"
    data_prep.prepare(data_prep.sources.botocore(), out, max_documents=60, progress=False)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]]
)
def test_the_screen_of_code_runs(workplace, launcher):
    command = [sys.executable, *launcher, "script.py"]
    done = subprocess.run(command, cwd=workplace, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"step \d: loss ([\d.]+)", done.stdout)]
    ranks = 4 if launcher else 1
    assert len(losses) == 3 * ranks
    assert all(9 < loss < 11.5 for loss in losses)


def test_the_files_it_names_exist():
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link).exists(), link
    for folder in re.findall(r"^\| `(\w[\w/]*)` \|", README, re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder


def test_studio_is_told_what_is_checked_in_its_versions():
    assert f"```sh\n{studio.LINES}```" in README
    for name in ("torch", "transformers", "numpy"):
        assert studio.PACKAGES[name] in README


def test_every_notebook_is_in_the_table():
    for notebook in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"):
        assert f"(notebooks/{notebook.name})" in README


def test_the_tutorials_config_is_the_run_the_readme_describes():
    config = train_config.load(ROOT / "notebooks" / "tutorial.toml", environment={})
    assert config.run.nproc == 4 and config.parallel.hybrid_shard_degree == 2
    assert config.data.path == "artifacts/data/botocore"
    assert config.run.folder == "artifacts/tutorial"


def test_the_picture_is_drawn_by_its_script(tmp_path):
    pytest.importorskip("matplotlib")
    from ci import draw_overview

    drawn = draw_overview.draw(tmp_path / "a.svg").read_text()
    assert drawn == draw_overview.draw(tmp_path / "b.svg").read_text()
    assert drawn.count("<g id=") > 50 and (ROOT / "notebooks" / "overview.svg").exists()
