"""Public names: static for editors, lazy at run time, documented with examples that run."""

import ast
import inspect
import re
import shutil
import textwrap
import warnings
from pathlib import Path

import pytest

import nearlinear as nl
from ci import api_reference
from tests.support import tiny

TREE = ast.parse(Path(nl.__file__).read_text(encoding="utf-8"))


def static_exports() -> dict[str, str]:
    """Module of each name imported under TYPE_CHECKING, as type checkers read them."""
    found = {}
    for node in TREE.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.body:
                assert isinstance(statement, ast.ImportFrom)
                found |= {alias.asname: statement.module or "" for alias in statement.names}
    return found


def test_static_and_lazy_exports_are_equal():
    assert static_exports() == nl._EXPORTS
    assert set(nl.__all__) == {"__version__", *nl._EXPORTS}
    assert set(nl.__all__) <= set(dir(nl))


EXAMPLE = re.compile(r"::\n\n((?: {4}.*\n|\n)+)")
WITHOUT_JOB = ("TrainConfig", "Trainer", "errors", "plan", "plots", "spmd")
"""Names whose example runs outside of a job."""
NEEDS_GPU = ("convert_to_fp8",)
UNSHARDED = (
    "checkpoint_activations", "compile_blocks", "deferred_init", "import_hf",
    "offload_activations", "pipeline", "shard", "transform",
)  # fmt: skip
"""Names whose example starts with a model that is not sharded yet."""


def examples(name: str) -> list[str]:
    text = inspect.getdoc(getattr(nl, name)) + "\n"
    return [textwrap.dedent(code) for code in EXAMPLE.findall(text)]


@pytest.mark.parametrize("name", sorted(nl._EXPORTS))
def test_public_name_has_an_example(name):
    assert examples(name), f"the docstring of nl.{name} has no example"


def values(name: str, rank: int) -> dict:
    """Names that the example of ``name`` uses without defining them."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM

    nl.init({"bf16": name == "shard"} | ({"fp16": True} if name == "loss_scaler" else {}))
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.llama(2)
    config = model.config
    if name not in UNSHARDED:
        nl.shard(model)
    if name == "activation_offload_stats":
        nl.offload_activations(model)
    batch = tiny.batch(tiny.rows(rank, 2))
    optimizer = None
    if name not in UNSHARDED:
        optimizer = torch.optim.AdamW(model.parameters())
    return dict(
        nl=nl, torch=torch, dist=dist, init_device_mesh=init_device_mesh,
        AutoModelForCausalLM=AutoModelForCausalLM, config=config, model=model, batch=batch,
        micro_batches=[batch, batch], optimizer=optimizer, loss=torch.ones(()), steps=1,
        loader=iter([batch]),
    )  # fmt: skip


@pytest.mark.slow
def test_examples_of_public_names_run(tmp_path, monkeypatch, token_folder):
    """In one folder, since some of them read files that others write."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(token_folder, tmp_path / "data/botocore")
    (tmp_path / "run.toml").write_text(
        '[model]\npreset = "gpt2-tiny"\n[data]\npath = "data/botocore"\n'
        '[train]\nsteps = 2\n[run]\nfolder = "runs/first"\n'
    )

    def work(rank, name):
        for code in examples(name):
            exec(code.replace('"cuda"', '"cpu"'), values(name, rank))

    def run(name):
        try:
            nl.spmd.run(work, 8, args=(name,), timeout=60)
        except Exception as error:
            error.add_note(f"in the example of nl.{name}")
            raise

    nl.Trainer("run.toml").fit()
    nl.shutdown()
    for name in WITHOUT_JOB:
        for code in examples(name):
            exec(code, {"nl": nl})
        nl.shutdown()
    in_job = set(nl._EXPORTS) - {*WITHOUT_JOB, *NEEDS_GPU}
    for name in sorted(in_job, key=lambda name: (name == "load", name)):
        run(name)


def test_api_reference_is_current():
    message = "run python -m ci.api_reference"
    assert api_reference.PAGE.read_text(encoding="utf-8") == api_reference.render(), message


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        nl.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", sorted(nl._DEPRECATED))
def test_deprecated_name_warns_and_names_its_replacement(name):
    assert name not in nl.__all__
    with pytest.warns(DeprecationWarning, match=rf"nearlinear.{name} is deprecated: use "):
        value = getattr(nl, name)
    assert value is not None


def test_public_names_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in nl.__all__:
            getattr(nl, name)
