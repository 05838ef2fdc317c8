"""nearlinear-compat: imports of other libraries, and scripts run with them."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nearlinear as nl
import nearlinear_compat
from nearlinear.launch import local
from nearlinear_compat import __main__ as command
from nearlinear_compat.finder import ALIASES

SCRIPTS = Path(__file__).parent / "scripts"


def test_aliases_are_the_modules_themselves(finder):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("smdistributed")
    nearlinear_compat.install()
    assert nearlinear_compat.install() is sys.meta_path[0]  # once
    smp = importlib.import_module("smdistributed.modelparallel.torch")
    own = importlib.import_module("nearlinear.compat.smp")
    assert smp is own and own.__spec__.name == own.__name__ == "nearlinear.compat.smp"
    gpt2 = importlib.import_module("smdistributed.modelparallel.torch.nn.huggingface.gpt2")
    assert gpt2 is own.nn.huggingface.gpt2
    with pytest.raises(ModuleNotFoundError, match="smdistributed.modelparallel.torch.missing"):
        importlib.import_module("smdistributed.modelparallel.torch.missing")
    with pytest.raises(ModuleNotFoundError, match="smdistributed.other"):
        importlib.import_module("smdistributed.other")
    engine = importlib.import_module("transformer_engine.pytorch")
    assert engine is importlib.import_module("nearlinear.compat.tsm.transformer_engine")
    assert importlib.import_module("transformer_engine.common.recipe").Format is engine.Format


def test_an_installed_library_is_not_replaced(finder, tmp_path, monkeypatch):
    package = tmp_path / "smdistributed" / "modelparallel" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("REAL = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = nearlinear_compat.install()
    assert importlib.import_module("smdistributed.modelparallel.torch").REAL
    assert "smdistributed.modelparallel.torch" not in found.aliases
    assert len(found.aliases) == len(ALIASES) - 1


def test_versions_are_those_of_the_last_releases(finder):
    nearlinear_compat.install()
    assert importlib.import_module("smdistributed.modelparallel").__version__ == "1.15.0"


def test_a_script_runs_as_main_with_its_arguments(finder, tmp_path, monkeypatch, capsys):
    (tmp_path / "beside.py").write_text("HERE = 'beside the script'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside, torch\n"
        "torch.cuda.set_device(0)\n"
        "import smdistributed.modelparallel.torch as smp\n"
        "smp.init({})\n"
        "print(__name__, sys.argv[1:], beside.HERE, smp.size())\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(torch.cuda, "set_device", torch.cuda.set_device)  # restores it
    monkeypatch.setattr(sys, "path", list(sys.path))
    nl.shutdown()
    assert command.main(["run", str(script), "0"]) == 0
    assert capsys.readouterr().out == "__main__ ['0'] beside the script 1\n"
    assert not torch.distributed.is_initialized()
    with pytest.raises(SystemExit, match="3"):
        command.main(["run", str(script), "3"])
    nl.shutdown()


def test_ranks_are_started_by_nearlinear(tmp_path, monkeypatch, capsys):
    script, started = tmp_path / "script.py", []

    def run_ranks(ranks, module, arguments):
        started.append((ranks.num_ranks, module, arguments))
        return local.ExitStatus(1, "rank 1 has failed")

    script.write_text("")
    monkeypatch.setattr(local, "run_ranks", run_ranks)
    assert command.main(["run", "--ranks", "2", str(script), "--ranks", "x"]) == 1
    assert started == [(2, "nearlinear_compat", ["run", str(script), "--ranks", "x"])]
    assert "error: rank 1 has failed" in capsys.readouterr().err


def test_wrong_commands_are_explained(capsys, tmp_path):
    assert command.main([]) == 2 and "usage: python -m nearlinear_compat run" in (
        capsys.readouterr().err
    )
    assert command.main(["--help"]) == 0 and "torch.sagemaker" in capsys.readouterr().out
    assert command.main(["run", str(tmp_path / "no.py")]) == 2
    assert "there is no script" in capsys.readouterr().err


@pytest.mark.skipif(
    importlib.util.find_spec("nearlinear.compat.smddp") is None, reason="no nearlinear.compat.smddp"
)
def test_smddp_runs_under_torchrun():
    torch.manual_seed(0)
    model, rows = torch.nn.Linear(4, 1), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--no-python",
    ]
    command += [
        sys.executable,
        "-m",
        "nearlinear_compat",
        "run",
        str(SCRIPTS / "replicate.py"),
        "x",
    ]
    path = os.pathsep.join(each for each in sys.path if each)
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    name, backend, found = done.stdout.split()
    assert (name, backend) == ("x", "smddp")
    assert float(found) == pytest.approx(loss.item(), abs=1e-5)
