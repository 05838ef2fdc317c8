"""Every shipped config fits on the cluster that it names: pages, notebooks and config files.

TOML is taken from Markdown blocks and from strings of notebooks, whose placeholders are filled with
the values below.
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest

import nearlinear as nl
from nearlinear.config import train as train_config
from nearlinear.launch import gate, spec

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK_02 = ROOT / "notebooks" / "02_train_gpt2.py"
GIB = 2**30


def scales() -> dict:
    """Return the table ``SCALES`` of notebook 02."""
    for node in ast.parse(NOTEBOOK_02.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SCALES":
            return eval(ast.unparse(node.value), {"degree": 128})
    raise AssertionError("notebook 02 has no table SCALES")


def placeholders() -> dict[str, dict]:
    """Return the values of the placeholders by notebook."""
    names = "name ranks shards length micro_batch accumulation steps rate bf16".split()
    cluster = dict(zip(names, scales()["cluster"], strict=True))

    class System:
        @staticmethod
        def input_toml(folder: str) -> str:
            inside = f'directory = "/abcdefgh/{folder}"'
            return f'[job.inputs.train]\nfsx = "fs-0123456789abcdef0"\n{inside}\n'

    return {
        "02_train_gpt2": cluster | {"degree": 128, "scale": "cluster", "shrink": "", "work": ROOT},
        "08_fsx_input": {
            "per_rank": 2, "steps": 12, "image": "auto", "bucket": "my-bucket", "system": System,
            "role": "arn:aws:iam::123456789012:role/nearlinear",
            "subnet": "subnet-0123456789abcdef0", "security_group": "sg-0123456789abcdef0",
        },
    }  # fmt: skip


def strings_of(path: Path) -> list[str]:
    """Return the strings of a notebook that hold a whole config, with placeholders filled."""
    found, values = [], placeholders().get(path.stem, {})
    nodes = list(ast.walk(ast.parse(path.read_text())))
    parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if not isinstance(node, ast.JoinedStr | ast.Constant) or node in parts:
            continue
        source = ast.unparse(node)
        if "[model]\\n" in source or "[model]\n" in source:
            found.append(eval(source, dict(values)))
    return [text for text in found if re.search(r"^\[model\]", text, re.MULTILINE)]


def configs() -> list[tuple[str, str]]:
    """Return name and TOML of every shipped config that names a preset."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "packages/core/docs").rglob("*.md"))]:
        blocks = re.findall(r"```toml\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        found += [(path.name, block) for block in blocks]
    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.py")):
        found += [(path.stem, text) for text in strings_of(path)]
    found.append(("tutorial.toml", (ROOT / "notebooks/tutorial.toml").read_text()))
    return found


JOBS = [
    pytest.param(text, id=f"{name}-{number}")
    for number, (name, text) in enumerate(configs())
    if "[job]" in text
]


def test_every_kind_of_shipped_config_is_found():
    names = [name for name, _ in configs()]
    for name in ("launch.md", "02_train_gpt2", "08_fsx_input", "tutorial.toml"):
        assert name in names
    assert len(JOBS) == 3


@pytest.mark.parametrize("text", JOBS)
def test_job_fits_its_machines(text):
    data = tomllib.loads(text)
    if data["job"]["name"] == "gpt2-30b" and "activations" not in data:  # refused in notebook 02
        assert not nl.plan(data, "p4d.24xlarge:32").fits
        data["activations"] = {"checkpoint": "each", "offload": True}
    job, config = spec.load(data)
    found = gate.forecast(job, config)
    assert gate.refusals(job, found) == []
    if job.instance_type == "ml.g5.8xlarge":  # the planner has no record of its GPU
        assert found.plan is None and config.model.preset == "gpt2-tiny"
    else:
        assert found.plan is not None and found.plan.memory < 37 * GIB


def test_cluster_scale_of_notebook_02_fits():
    (text,) = [text for name, text in configs() if name == "02_train_gpt2" and "[job]" not in text]
    plan = nl.plan(tomllib.loads(text), "p4d.24xlarge:32")
    assert plan.memory < 37 * GIB and plan.cluster.world == 256


def test_configs_without_a_job_are_valid(caplog):
    for name, text in configs():
        if "[job]" not in text and "[job." not in text:
            train_config.load(tomllib.loads(text), environment={})
            assert not caplog.records, (name, caplog.text)
