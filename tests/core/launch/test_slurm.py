"""Slurm batch scripts: Slurm accepts them, their ranks train, and invalid jobs are rejected.

Most tests use a stub of Slurm. If ``python -m ci.emulation.slurm`` has installed Slurm, the last
ones use it with two nodes.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ci.emulation import slurm as real
from nearlinear.errors import ConfigError
from nearlinear.launch import slurm, spec

SRUN = """\
#!/bin/bash
# Start SLURM_NTASKS copies with the variables of a step.
while [[ $1 == --* ]]; do shift; done
for ((task = 0; task < SLURM_NTASKS; task++)); do
  SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1 "$@" & tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || failed=$?; done
exit ${failed:-0}
"""
# Replaces python: records the arguments, environment and signals of a rank.
WITNESS = """\
#!{python}
import json, os, pathlib, signal, sys, time
left = pathlib.Path({folder!r}) / (os.environ["SLURM_PROCID"] + ".json")
told = {{"words": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}}
left.write_text(json.dumps(told))
def end(number, frame):
    left.with_suffix(".notice").write_text(str(number))
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
left.with_suffix(".ready").touch()
time.sleep({seconds})
"""


def job_of(data, **changes):
    return spec.load(data | {"job": data.get("job", {}) | changes})[0]


def on_cpus(data, **changes):
    return job_of(data, **{"instance_type": "cpu", "ranks_per_node": 1, **changes})


@pytest.fixture
def witness(tmp_path):
    """Return a factory of a PATH folder whose python records its ranks in ``left``."""

    def make(seconds: float = 0) -> Path:
        folder, left = tmp_path / "witness", tmp_path / "left"
        folder.mkdir()
        left.mkdir()
        text = WITNESS.format(python=sys.executable, folder=str(left), seconds=seconds)
        (folder / "python").write_text(text)
        (folder / "python").chmod(0o755)
        return folder

    return make


@pytest.fixture
def scheduler(tmp_path):
    """Return a function that runs a script like sbatch, with a stub for srun."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text(SRUN)
    (folder / "srun").chmod(0o755)
    (folder / "python").symlink_to(sys.executable)

    def run(script: str, path: Path = folder) -> subprocess.CompletedProcess:
        options = dict(
            line.removeprefix("#SBATCH --").split("=", 1)
            for line in script.splitlines()
            if line.startswith("#SBATCH --") and "=" in line
        )
        tasks = int(options["nodes"]) * int(options["ntasks-per-node"])
        return subprocess.run(
            ["bash", "-s"],
            input=script,
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": os.pathsep.join([str(path), str(folder), os.environ["PATH"]]),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "OMP_NUM_THREADS": "1",
                "SLURM_NTASKS": str(tasks),
                "SLURM_NNODES": options["nodes"],
                "SLURM_JOB_NODELIST": "localhost",
                "SLURM_JOB_ID": str(os.getpid()),
            },
            capture_output=True,
            text=True,
        )

    return run


# --- the script -----------------------------------------------------------------------------------


def test_script_requests_the_resources_of_the_job():
    asked = {
        "name": "gpt2-30b",
        "nodes": 32,
        "max_hours": 36.5,
        "partition": "p4d",
        "account": "models",
        "retries": 1,
        "environment": {"NCCL_DEBUG": "WARN"},
    }
    script = slurm.render_script(job_of({}, **asked), "run.toml")
    options, commands = script.split("set -euo pipefail\n")
    for option in (
        "job-name=gpt2-30b",
        "nodes=32",
        "ntasks-per-node=8",
        "gpus-per-node=8",
        "exclusive",
        "mem=0",
        "time=36:30:00",
        "signal=TERM@120",
        "partition=p4d",
        "account=models",
        "requeue",
        "open-mode=append",
    ):
        assert f"\n#SBATCH --{option}\n" in options
    assert "export NCCL_DEBUG=WARN\n" in commands
    least = slurm.render_script(on_cpus({}), "run.toml")
    assert "#SBATCH --no-requeue\n" in least
    assert not {"account", "partition", "gpus", "container"} & set(re.findall(r"\w+", least))


def test_input_train_is_data_path_unless_the_config_has_sources():
    job = job_of({}, image="nearlinear.sqsh", inputs={"train": {"path": "/fsx/books"}})
    assert "--set data.path=/fsx/books" in slurm.render_script(job, "run.toml")
    script = slurm.render_script(job, "run.toml", sources=["/fsx/books", "/fsx/code", "s3://b/web"])
    assert "data.path" not in script
    assert "/fsx/books:/fsx/books,/fsx/code:/fsx/code," in script and "s3://" not in script


def test_own_machine_requests_its_gpus():
    script = slurm.render_script(job_of({}, instance_type="dgx", accelerators=4), "run.toml")
    assert "--gpus-per-node=4\n" in script and "--ntasks-per-node=4\n" in script


def test_container_mounts_all_folders_of_the_job():
    inputs = {"train": {"path": "/fsx", "directory": "gpt2"}, "val": {"path": "/my val"}}
    job = job_of({}, image="registry/nearlinear:1", inputs=inputs)
    script = slurm.render_script(
        job, "/home/me/run.toml", output_folders=["runs/latest", "/fsx/kept"]
    )
    (line,) = [it for it in script.splitlines() if "srun" in it]
    words = shlex.split(line.rstrip("\\"))
    assert "--container-image=registry/nearlinear:1" in words
    assert "--container-workdir=$PWD" in words  # double-quoted, so that the shell expands it
    assert '"$PWD:$PWD"' in line and '--container-workdir="$PWD"' in line
    (mounts,) = [it.partition("=")[2] for it in words if it.startswith("--container-mounts=")]
    folders = ["/home/me", "/fsx/gpt2", "/my val", "/fsx/kept", "$PWD"]
    assert mounts.split(",") == [f"{folder}:{folder}" for folder in folders]


HARD = {
    "QUOTES": 'it\'s "here"',
    "DOLLAR": "$HOME ${HOME} $(id) `id`",
    "LINES": "a\n#SBATCH --nodes=9\n\nb\n",
    "BLANKS": "  a\t b  ",
    "BACK": "\\n \\",
    "EMPTY": "",
    "GREEK": "\u03bb",
    "GLOB": "* ? [a-z] ~ ! ; & |",
}


@pytest.mark.slow
def test_arguments_and_variables_are_quoted(scheduler, witness, tmp_path):
    source = tmp_path / "my 'source'"
    source.mkdir()
    inputs = {"train": {"path": "/my data/$x", "directory": "a b"}}
    job = on_cpus({}, ranks_per_node=2, environment=HARD, inputs=inputs, source=str(source))
    assert slurm.check_slurm_job(job) == []
    config, setting = "/my configs/run's.toml", 'train.sample_prompt="$HOME \'\n`id`"'
    done = scheduler(slurm.render_script(job, config, [setting]), witness())
    assert done.returncode == 0, done.stderr
    for rank in ("0", "1"):
        told = json.loads((tmp_path / "left" / f"{rank}.json").read_text())
        assert {name: told["environment"].get(name) for name in HARD} == HARD
        assert told["folder"] == str(source)
        assert told["words"] == [
            *("-m", "nearlinear.cli", "train", config),
            *("--set", "data.path=/my data/$x/a b", "--set", setting),
        ]


@pytest.mark.slow
def test_script_trains_on_two_tasks(small_run, scheduler, tmp_path):
    tokens = small_run["data"].pop("path")
    path = tmp_path / "my run.json"
    path.write_text(json.dumps(small_run))
    job = on_cpus(small_run, ranks_per_node=2, inputs={"train": {"path": tokens}})
    done = scheduler(slurm.render_script(job, str(path), ["train.steps=3"]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done: 3 steps") == 1 and "2 ranks" in done.stdout + done.stderr
    lines = Path(small_run["run"]["folder"], "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 3


@pytest.mark.slow
def test_failing_task_fails_the_script(small_run, scheduler, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(small_run | {"data": {"path": str(tmp_path / "none")}}))
    done = scheduler(slurm.render_script(on_cpus(small_run, ranks_per_node=2), str(path)))
    assert done.returncode == 2 and "none" in done.stderr


# --- validation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "where", "fix"),
    [
        ({"inputs": {"train": {"claim": "a"}}}, "job.inputs.train", "as path"),
        ({"inputs": {"train": {"s3": "s3://a/b"}}}, "job.inputs.train", "as path"),
        ({"name": ""}, "job.name", "give the job a name"),
        ({"name": "my job"}, "job.name", "letters, digits"),
        ({"name": "a\n#SBATCH --nodes=9"}, "job.name", "letters, digits"),
        ({"name": "a%j"}, "job.name", "letters, digits"),
        ({"partition": "a b"}, "job.partition", "commas"),
        ({"partition": "a,,b"}, "job.partition", "commas"),
        ({"account": "a,b"}, "job.account", "beginning with a letter"),
        ({"environment": {"A B": "1"}}, "job.environment.A B", "begin with a letter or _"),
        ({"environment": {"X=1; id": "1"}}, "job.environment.X=1; id", "begin with a letter or _"),
        ({"environment": {"RANK": "0"}}, "job.environment.RANK", "remove"),
        ({"environment": {"SLURM_PROCID": "0"}}, "job.environment.SLURM_PROCID", "remove"),
        ({"environment": {"LOCAL_RANK": "0"}}, "job.environment.LOCAL_RANK", "remove"),
        ({"output": "s3://a/b"}, "job.output", "run.folder"),
        ({"checkpoints": "s3://a/b"}, "job.checkpoints", "run.folder"),
        ({"spot": True}, "job.spot", "remove"),
        ({"keep_warm_minutes": 5}, "job.keep_warm_minutes", "remove"),
        (
            {"image": "a/b:1", "inputs": {"train": {"path": "/a:b"}}},
            "job.inputs.train",
            "another name",
        ),
    ],
)
def test_problem_names_field_and_remedy(changes, where, fix):
    (problem,) = slurm.check_slurm_job(on_cpus({}, **changes))
    assert problem.field == where and fix in problem.remedy


def test_environment_of_every_backend_refuses_nul():
    with pytest.raises(ConfigError, match="job.environment.A = .*must not contain .* NUL"):
        on_cpus({}, environment={"A": "\0"})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"partition": "gpu-a,gpu_b", "account": "team.models", "name": "GPT2_30b.a-1"},
        {"inputs": {"train": {"path": "/a:b, c"}}},  # no mounts without a container
        {"environment": {"MASTER_PORT": "29500", "RANKED": "1"}},
    ],
)
def test_valid_jobs_have_no_problems(changes):
    assert slurm.check_slurm_job(on_cpus({}, **changes)) == []


# --- Slurm itself ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    """Start two Slurm nodes; return the environment for its commands."""
    if not real.is_unpacked():
        pytest.skip("Slurm is not installed: run python -m ci.emulation.slurm (Debian, 3 MB)")
    with real.running() as environment:
        yield environment | {"OMP_NUM_THREADS": "1"}


def ask(cluster: dict, *command: str, text: str | None = None, **options):
    return subprocess.run(
        command, env=cluster, input=text, capture_output=True, text=True, timeout=120, **options
    )


def run(cluster: dict, script: str, folder: Path) -> str:
    """Submit a script to Slurm and return the final state of the job."""
    number = ask(cluster, "sbatch", "--parsable", text=script, cwd=folder).stdout.strip()
    assert number.isdecimal()
    while True:
        said = ask(cluster, "scontrol", "show", "job", number).stdout
        state = re.search(r"JobState=(\w+)", said)[1]
        if state not in ("PENDING", "RUNNING", "COMPLETING"):
            return state
        time.sleep(0.2)


def test_slurm_accepts_every_option(cluster):
    job = on_cpus({}, nodes=2, retries=1, partition="all", account="a")
    script = slurm.render_script(job, "run.toml")
    done = ask(cluster, "sbatch", "--test-only", text=script)
    assert done.returncode == 0 and "to start at" in done.stderr, done.stderr
    options = re.findall(r"#SBATCH (--[a-z-]+)", script)
    assert len(options) > 10
    for option in options:  # an unknown option would be reported
        wrong = script.replace(f"#SBATCH {option}", f"#SBATCH {option}x", 1)
        assert "unrecognized option" in ask(cluster, "sbatch", "--test-only", text=wrong).stderr
    gpus = slurm.render_script(job_of({}, instance_type="g5.xlarge"), "run.toml")
    said = ask(cluster, "sbatch", "--test-only", text=gpus).stderr
    assert "Invalid generic resource" in said  # the option is parsed, but these nodes have no GPU


def test_slurm_grants_the_requested_resources(cluster, tmp_path):
    job = on_cpus({}, nodes=2, retries=1, max_hours=1.5, name="gpt2")
    submitted = ask(
        cluster,
        "sbatch",
        "--parsable",
        "--hold",
        text=slurm.render_script(job, "run.toml"),
        cwd=tmp_path,
    )
    number = submitted.stdout.strip()
    said = dict(
        it.split("=", 1)
        for it in ask(cluster, "scontrol", "show", "job", number).stdout.split()
        if "=" in it
    )
    ask(cluster, "scancel", number)
    assert (said["JobName"], said["NumNodes"], said["NumTasks"]) == ("gpt2", "2-2", "2")
    assert (said["TimeLimit"], said["Requeue"], said["OverSubscribe"]) == ("01:30:00", "1", "NO")
    assert said["StdOut"] == str(tmp_path / f"gpt2-{number}.log")


@pytest.mark.slow
def test_two_slurm_nodes_train(small_run, cluster, tmp_path):
    tokens = small_run["data"].pop("path")
    path = tmp_path / "my run.json"
    path.write_text(json.dumps(small_run))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    here = cluster | {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{cluster['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    job = on_cpus(small_run, nodes=2, inputs={"train": {"path": tokens}}, name="two")
    script = slurm.render_script(job, str(path), ["train.steps=3"])
    state = run(here, script, tmp_path)
    (log,) = tmp_path.glob("two-*.log")
    assert state == "COMPLETED", log.read_text()
    assert log.read_text().count("done: 3 steps") == 1 and "2 ranks on 2 nodes" in log.read_text()


@pytest.mark.slow
def test_slurm_signals_ranks_before_the_time_limit(cluster, witness, tmp_path):
    """A job of one minute is signalled at once, because the notice is longer."""
    here = cluster | {"PATH": f"{witness(seconds=100)}{os.pathsep}{cluster['PATH']}"}
    script = slurm.render_script(on_cpus({}, nodes=2, max_hours=1 / 60), "run.toml")
    assert run(here, script, tmp_path) == "COMPLETED"
    notices = sorted((tmp_path / "left").glob("*.notice"))
    assert [(it.stem, it.read_text()) for it in notices] == [("0", "15"), ("1", "15")]
