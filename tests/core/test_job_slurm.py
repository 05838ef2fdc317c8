"""A job as a batch script: Slurm takes it, its ranks train, and what nodes could not do is said.

Slurm is a stub here, and Slurm itself where ``python -m ci.slurm`` has unpacked it: two nodes.
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

from ci import slurm as real
from nearlinear.launch import sbatch, spec

SRUN = """\
#!/bin/bash
# Starts what sbatch was asked for: SLURM_NTASKS copies, in the variables of a step.
while [[ $1 == --* ]]; do shift; done
for ((task = 0; task < SLURM_NTASKS; task++)); do
  SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1 "$@" & tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || failed=$?; done
exit ${failed:-0}
"""
# Stands for python: leaves what a rank was given, and how it was ended.
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
    """A folder for PATH with another python in it, whose ranks leave in ``left`` what they got."""

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
    """Runs a script as sbatch does, with a stub for srun; returns what it printed."""
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


# --- the script ----------------------------------------------------------------------------------


def test_a_batch_script_asks_for_what_the_job_says():
    asked = {
        "name": "gpt2-30b",
        "nodes": 32,
        "max_hours": 36.5,
        "partition": "p4d",
        "account": "models",
        "retries": 1,
        "environment": {"NCCL_DEBUG": "WARN"},
    }
    script = sbatch.script(job_of({}, **asked), "run.toml")
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
    least = sbatch.script(on_cpus({}), "run.toml")
    assert "#SBATCH --no-requeue\n" in least
    assert not {"account", "partition", "gpus", "container"} & set(re.findall(r"\w+", least))


def test_the_input_train_is_the_data_unless_the_config_names_its_own():
    job = job_of({}, image="nearlinear.sqsh", inputs={"train": {"path": "/fsx/books"}})
    assert "--set data.path=/fsx/books" in sbatch.script(job, "run.toml")
    script = sbatch.script(job, "run.toml", sources=["/fsx/books", "/fsx/code", "s3://b/web"])
    assert "data.path" not in script
    assert "/fsx/books:/fsx/books,/fsx/code:/fsx/code," in script and "s3://" not in script


def test_a_machine_of_ones_own_has_gpus():
    script = sbatch.script(job_of({}, instance_type="dgx", accelerators=4), "run.toml")
    assert "--gpus-per-node=4\n" in script and "--ntasks-per-node=4\n" in script


def test_a_container_sees_what_the_job_names():
    inputs = {"train": {"path": "/fsx", "directory": "gpt2"}, "val": {"path": "/my val"}}
    job = job_of({}, image="registry/nearlinear:1", inputs=inputs)
    script = sbatch.script(job, "/home/me/run.toml", written=["runs/latest", "/fsx/kept"])
    (line,) = [it for it in script.splitlines() if "srun" in it]
    words = shlex.split(line.rstrip("\\"))
    assert "--container-image=registry/nearlinear:1" in words
    assert "--container-workdir=$PWD" in words  # for the shell: it stands in double quotes
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
def test_ranks_get_words_and_variables_as_they_were_written(scheduler, witness, tmp_path):
    source = tmp_path / "my 'source'"
    source.mkdir()
    inputs = {"train": {"path": "/my data/$x", "directory": "a b"}}
    job = on_cpus({}, ranks_per_node=2, environment=HARD, inputs=inputs, source=str(source))
    assert sbatch.check(job) == []
    config, setting = "/my configs/run's.toml", 'train.sample_prompt="$HOME \'\n`id`"'
    done = scheduler(sbatch.script(job, config, [setting]), witness())
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
def test_a_batch_script_trains_on_two_tasks(small_run, scheduler, tmp_path):
    tokens = small_run["data"].pop("path")
    path = tmp_path / "my run.json"
    path.write_text(json.dumps(small_run))
    job = on_cpus(small_run, ranks_per_node=2, inputs={"train": {"path": tokens}})
    done = scheduler(sbatch.script(job, str(path), ["train.steps=3"]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done: 3 steps") == 1 and "2 ranks" in done.stdout + done.stderr
    lines = Path(small_run["run"]["folder"], "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 3


@pytest.mark.slow
def test_a_failing_task_fails_the_batch_script(small_run, scheduler, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(small_run | {"data": {"path": str(tmp_path / "none")}}))
    done = scheduler(sbatch.script(on_cpus(small_run, ranks_per_node=2), str(path)))
    assert done.returncode == 2 and "none" in done.stderr


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "where", "fix"),
    [
        ({"inputs": {"train": {"claim": "a"}}}, "job.inputs.train", "as path"),
        ({"inputs": {"train": {"s3": "s3://a/b"}}}, "job.inputs.train", "as path"),
        ({"name": ""}, "job.name", "name the job"),
        ({"name": "my job"}, "job.name", "letters, digits"),
        ({"name": "a\n#SBATCH --nodes=9"}, "job.name", "letters, digits"),
        ({"name": "a%j"}, "job.name", "letters, digits"),
        ({"partition": "a b"}, "job.partition", "commas"),
        ({"partition": "a,,b"}, "job.partition", "commas"),
        ({"account": "a,b"}, "job.account", "between them"),
        ({"environment": {"A B": "1"}}, "job.environment.A B", "no digit first"),
        ({"environment": {"X=1; id": "1"}}, "job.environment.X=1; id", "no digit first"),
        ({"environment": {"RANK": "0"}}, "job.environment.RANK", "leave it out"),
        ({"environment": {"SLURM_PROCID": "0"}}, "job.environment.SLURM_PROCID", "leave it out"),
        ({"environment": {"LOCAL_RANK": "0"}}, "job.environment.LOCAL_RANK", "leave it out"),
        ({"environment": {"A": "\0"}}, "job.environment.A", "leave that out"),
        ({"output": "s3://a/b"}, "job.output", "run.folder"),
        ({"checkpoints": "s3://a/b"}, "job.checkpoints", "run.folder"),
        ({"spot": True}, "job.spot", "leave it out"),
        ({"keep_warm_minutes": 5}, "job.keep_warm_minutes", "leave it out"),
        (
            {"image": "a/b:1", "inputs": {"train": {"path": "/a:b"}}},
            "job.inputs.train",
            "another name",
        ),
    ],
)
def test_a_fault_is_named_with_its_fix(changes, where, fix):
    (fault,) = sbatch.check(on_cpus({}, **changes))
    assert fault.where == where and fix in fault.fix


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"partition": "gpu-a,gpu_b", "account": "team.models", "name": "GPT2_30b.a-1"},
        {"inputs": {"train": {"path": "/a:b, c"}}},  # without a container there are no mounts
        {"environment": {"MASTER_PORT": "29500", "RANKED": "1"}},
    ],
)
def test_what_slurm_can_do_is_no_fault(changes):
    assert sbatch.check(on_cpus({}, **changes)) == []


# --- Slurm itself --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of Slurm; the environment for its commands."""
    if not real.found():
        pytest.skip("no Slurm is unpacked here: python -m ci.slurm does it (Debian, 3 MB)")
    with real.running() as environment:
        yield environment | {"OMP_NUM_THREADS": "1"}


def ask(cluster: dict, *command: str, text: str | None = None, **options):
    return subprocess.run(
        command, env=cluster, input=text, capture_output=True, text=True, timeout=120, **options
    )


def run(cluster: dict, script: str, folder: Path) -> str:
    """Give Slurm a script; how the job ended, once it has."""
    number = ask(cluster, "sbatch", "--parsable", text=script, cwd=folder).stdout.strip()
    assert number.isdecimal()
    while True:
        said = ask(cluster, "scontrol", "show", "job", number).stdout
        state = re.search(r"JobState=(\w+)", said)[1]
        if state not in ("PENDING", "RUNNING", "COMPLETING"):
            return state
        time.sleep(0.2)


def test_slurm_knows_every_option(cluster):
    job = on_cpus({}, nodes=2, retries=1, partition="all", account="a")
    script = sbatch.script(job, "run.toml")
    done = ask(cluster, "sbatch", "--test-only", text=script)
    assert done.returncode == 0 and "to start at" in done.stderr, done.stderr
    options = re.findall(r"#SBATCH (--[a-z-]+)", script)
    assert len(options) > 10
    for option in options:  # and would say so if it did not know one
        wrong = script.replace(f"#SBATCH {option}", f"#SBATCH {option}x", 1)
        assert "unrecognized option" in ask(cluster, "sbatch", "--test-only", text=wrong).stderr
    gpus = sbatch.script(job_of({}, instance_type="g5.xlarge"), "run.toml")
    said = ask(cluster, "sbatch", "--test-only", text=gpus).stderr
    assert "Invalid generic resource" in said  # it is read, and these nodes have no GPU


def test_slurm_gives_the_job_what_it_asks_for(cluster, tmp_path):
    job = on_cpus({}, nodes=2, retries=1, max_hours=1.5, name="gpt2")
    submitted = ask(
        cluster, "sbatch", "--parsable", "--hold", text=sbatch.script(job, "run.toml"), cwd=tmp_path
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
def test_two_nodes_of_slurm_train_together(small_run, cluster, tmp_path):
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
    script = sbatch.script(job, str(path), ["train.steps=3"])
    state = run(here, script, tmp_path)
    (log,) = tmp_path.glob("two-*.log")
    assert state == "COMPLETED", log.read_text()
    assert log.read_text().count("done: 3 steps") == 1 and "2 ranks on 2 nodes" in log.read_text()


@pytest.mark.slow
def test_ranks_on_slurm_are_told_before_their_time_is_over(cluster, witness, tmp_path):
    """A job of one minute is told at once, for the notice is longer than that."""
    here = cluster | {"PATH": f"{witness(seconds=100)}{os.pathsep}{cluster['PATH']}"}
    script = sbatch.script(on_cpus({}, nodes=2, max_hours=1 / 60), "run.toml")
    assert run(here, script, tmp_path) == "COMPLETED"
    notices = sorted((tmp_path / "left").glob("*.notice"))
    assert [(it.stem, it.read_text()) for it in notices] == [("0", "15"), ("1", "15")]
