"""`run` and `ci.environment`: decisions only; nothing is installed or downloaded."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
import threading
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from ci import environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run():
    loader = SourceFileLoader("run_script", str(ROOT / "run"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("run_script", loader))
    loader.exec_module(module)
    return module


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """Workspace of two packages: core, and an extension compiled against torch."""
    for name, requires in {"core": ["hatchling"], "fast": ["setuptools>=77", "torch>=2.6"]}.items():
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(f"[build-system]\nrequires = {requires}\n")
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(environment, "PYTHON", tmp_path / ".venv/bin/python")
    monkeypatch.setattr(environment, "LOG", tmp_path / ".venv/setup.log")
    monkeypatch.setattr(environment, "STAMP", tmp_path / ".venv/setup.json")
    return tmp_path


@pytest.fixture
def installs(workspace, monkeypatch):
    """Installer commands that `environment` would run, by name, in order."""
    commands = {}

    def record(name, command, env):
        commands[name] = command
        if name == "an empty environment":
            environment.PYTHON.parent.mkdir(parents=True)
            environment.PYTHON.symlink_to(sys.executable)

    monkeypatch.setattr(environment, "install_step", record)
    monkeypatch.setattr(environment, "pip_config", dict)
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    return commands


# run


def test_script_parses_on_python_3_8():
    ast.parse((ROOT / "run").read_text(), feature_version=(3, 8))


def test_old_python_is_rejected_with_the_required_version(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert run.main(["test"]) == 1
    assert "needs Python 3.11 or newer" in capsys.readouterr().out


@pytest.mark.parametrize("args", [[], ["help"], ["--help"], ["-h"]])
def test_help_lists_every_command(args):
    done = subprocess.run([sys.executable, ROOT / "run", *args], capture_output=True, text=True)
    assert done.returncode == 0
    for command in ["tutorial", "test", "docs", "race", "lab", "help"]:
        assert f"\n  {command} " in done.stdout


def test_unknown_command_is_rejected(run, capsys):
    assert run.main(["tset"]) == 2
    assert "'tset'" in capsys.readouterr().out


def test_test_passes_arguments_and_exit_code_on(run, monkeypatch):
    seen = []
    monkeypatch.setattr(environment, "ensure", lambda **additions: None)
    monkeypatch.setattr(run, "job", lambda command, **settings: seen.append(command) or 5)
    assert run.main(["test", "tests/core", "-k", "a"]) == 5
    assert run.main(["test"]) == 5
    assert seen[0] == ["python", "-m", "pytest", "tests/core", "-k", "a"]
    assert seen[1][:3] == ["python", "-m", "pytest"] and "--durations=15" in seen[1]


def test_tutorial_stops_at_a_failing_step(run, monkeypatch, capsys):
    codes = iter([0, 3])
    monkeypatch.setattr(environment, "ensure", lambda **additions: None)
    monkeypatch.setattr(run, "job", lambda command, **settings: next(codes))
    assert run.main(["tutorial"]) == 3
    last = capsys.readouterr().out.splitlines()[-1]
    assert "Step 2 of 3" in last and "exit code 3" in last and "nearlinear train" in last


def test_tutorial_prints_the_paths_of_results(run, monkeypatch, capsys, tmp_path):
    for name in ["index.html", "train/metrics.jsonl", "train/loss.png"]:
        path = tmp_path / "artifacts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "ensure", lambda **additions: None)
    monkeypatch.setattr(run, "job", lambda command, **settings: 0)
    assert run.main(["tutorial"]) == 0
    out = capsys.readouterr().out
    for path in [
        "artifacts/index.html",
        "artifacts/train/metrics.jsonl",
        "artifacts/train/loss.png",
    ]:
        assert path in out
    assert "./run lab" in out


def test_job_runs_offline_in_the_root_and_returns_its_exit_code(run, monkeypatch, tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.setattr(environment, "BIN", tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the caller's setting takes precedence
    check = (
        "import os, sys; e = os.environ; assert e['HF_HUB_OFFLINE'] == '1'; "
        f"assert e['OMP_NUM_THREADS'] == '3'; assert os.getcwd() == {str(ROOT)!r}; sys.exit(7)"
    )
    monkeypatch.chdir(tmp_path)
    assert run.job(["python", "-c", check], OMP_NUM_THREADS="1") == 7


# ci.environment


@pytest.mark.parametrize(
    "changed", ["constraints.txt", "packages/core/pyproject.toml", "packages/fast/setup.py"]
)
def test_fingerprint_changes_with_the_inputs_of_the_installation(workspace, changed):
    before = environment.fingerprint()
    assert environment.fingerprint() == before
    with (workspace / changed).open("a") as file:
        file.write("# changed\n")
    assert environment.fingerprint() != before


def test_new_environment_installs_torch_first_and_compiles_against_it(workspace, installs):
    environment.ensure()
    assert list(installs) == [
        "an empty environment",
        "PyTorch",
        f"packages/core[{environment.EXTRAS}]",
        "build tools of fast",
        "packages/fast",
    ]
    assert "--without-pip" not in installs["an empty environment"]
    assert "--no-build-isolation" in installs["packages/fast"]
    assert "--no-build-isolation" not in installs[f"packages/core[{environment.EXTRAS}]"]
    assert installs["build tools of fast"][-1] == "setuptools>=77"
    for name in list(installs)[1:]:
        assert "constraints.txt" in installs[name]


def test_environment_may_be_rebuilt_by_its_own_python(workspace, installs):
    environment.ensure()
    maker = Path(installs["an empty environment"][0])
    assert environment.works(maker)
    assert sys.prefix == sys.base_prefix or not maker.is_relative_to(sys.prefix)


def test_finished_environment_is_not_rebuilt(workspace, installs):
    environment.ensure()
    installs.clear()
    environment.ensure()
    assert not installs


def test_change_updates_the_environment(workspace, installs):
    environment.ensure()
    installs.clear()
    (workspace / "constraints.txt").write_text("torch==2.13.1\n")
    environment.ensure()
    assert "PyTorch" in installs and "an empty environment" not in installs


@pytest.mark.parametrize("damage", ["interrupted", "python gone", "moved", "other installer"])
def test_damaged_environment_is_rebuilt(workspace, installs, damage, monkeypatch):
    environment.ensure()
    installs.clear()
    stamp = json.loads(environment.STAMP.read_text())
    if damage == "interrupted":
        environment.STAMP.unlink()
    elif damage == "python gone":
        environment.PYTHON.unlink()
    elif damage == "moved":
        stamp.update(fingerprint="x", built_with=["/elsewhere", *stamp["built_with"][1:]])
        environment.STAMP.write_text(json.dumps(stamp))
    else:
        (workspace / "constraints.txt").write_text("torch==2.13.1\n")
        monkeypatch.setattr(environment.shutil, "which", lambda name: "/bin/uv")
    environment.ensure()
    assert "an empty environment" in installs


@pytest.mark.parametrize("extra", ["lab", "docs"])
def test_addition_is_installed_once_and_kept(workspace, installs, extra):
    environment.ensure()
    installs.clear()
    environment.ensure(**{extra: True})
    assert f"packages/core[{environment.EXTRAS},{extra}]" in installs
    installs.clear()
    environment.ensure()
    environment.ensure(**{extra: True})
    assert not installs
    environment.ensure(lab=True, docs=True)
    assert f"packages/core[{environment.EXTRAS},lab,docs]" in installs


def test_peers_are_built_for_the_installed_torch(workspace, installs):
    environment.ensure(peers=True)
    for peer in environment.PEERS:
        assert "--no-build-isolation" in installs[peer] and "constraints.txt" in installs[peer]
    assert list(installs)[-len(environment.PEERS) :] == environment.PEERS
    installs.clear()
    environment.ensure(peers=True)
    environment.ensure()
    assert not installs


def test_tests_continue_without_peers(workspace, installs, monkeypatch, capsys):
    def fail(name, command, env):
        if name in environment.PEERS:
            raise environment.SetupError("no compiler")
        install(name, command, env)

    install = environment.install_step
    monkeypatch.setattr(environment, "install_step", fail)
    environment.ensure(peers=True)
    said = capsys.readouterr().out
    assert "no compiler" in said and "deepspeed are skipped" in said
    monkeypatch.setattr(environment, "install_step", install)
    installs.clear()
    environment.ensure(peers=True)  # tries again on the existing environment
    assert "deepspeed" in installs and "PyTorch" not in installs


def test_foreign_venv_is_not_modified(workspace, installs):
    (workspace / ".venv").mkdir()
    (workspace / ".venv/pyvenv.cfg").touch()
    with pytest.raises(environment.SetupError, match="was not created by ./run"):
        environment.ensure()
    assert not installs and (workspace / ".venv/pyvenv.cfg").exists()


def test_uv_receives_the_settings_of_pip():
    env = environment.uv_environment(
        {"PIP_FIND_LINKS": "/wheels https://b/x", "PIP_INDEX_URL": "https://a/simple"},
        {"find-links": "/other", "extra-index-url": "https://c/simple"},
    )
    assert env["UV_FIND_LINKS"] == "/wheels,https://b/x"
    assert env["UV_DEFAULT_INDEX"] == "https://a/simple"
    assert env["UV_INDEX"] == "https://c/simple"


def test_settings_of_uv_take_precedence():
    env = environment.uv_environment({"UV_FIND_LINKS": "/mine", "PIP_FIND_LINKS": "/wheels"}, {})
    assert env["UV_FIND_LINKS"] == "/mine"
    assert "UV_DEFAULT_INDEX" not in env


@pytest.mark.parametrize(
    "output, words",
    [
        ("The virtual environment was not created: ensurepip is not available", "python3-venv"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        (
            "WARNING: Retrying: NewConnectionError(...)\nNo matching distribution",
            "cannot be reached",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0", "constraints.txt"),
        ("something else", "above"),
    ],
)
def test_installer_failures_have_a_remedy(output, words):
    assert words in environment.remedy(output)


def test_failed_installer_shows_its_last_lines(workspace, capsys):
    (workspace / ".venv").mkdir()
    command = [sys.executable, "-c", "print('ensurepip is not available'); raise SystemExit(1)"]
    with pytest.raises(environment.SetupError) as failure:
        environment.install_step("an empty environment", command, os.environ)
    assert "sudo apt install python3-venv" in str(failure.value)
    assert "    ensurepip is not available" in str(failure.value)
    assert "ensurepip is not available" in environment.LOG.read_text()


def test_concurrent_builds_wait_for_each_other(tmp_path, capsys):
    order = []

    def second():
        with environment.file_lock(tmp_path / "lock"):
            order.append("second")

    with environment.file_lock(tmp_path / "lock"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(timeout=0.3)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert "waiting" in capsys.readouterr().out


def test_missing_file_locks_print_a_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with environment.file_lock(tmp_path / "lock"):
        pass
    assert "File locks are not available" in capsys.readouterr().out


def test_constraints_are_exact_pins():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or (
            line.count("==") == 1 and "+" not in line and "/" not in line
        )
