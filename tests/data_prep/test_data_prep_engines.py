"""datatrove's executors and a Processing job give the bytes of one machine."""

import json
import os
import sys
from pathlib import Path

import pytest

import data_prep
from data_prep import processing
from data_prep.__main__ import main
from data_prep.sources import source as splitting
from nearlinear.data.format import Manifest
from nearlinear.errors import ConfigError, DataError

# One after another what sbatch would queue: each task of the array is the script, with its number.
SBATCH = """#!/bin/sh
for argument in "$@"; do
  case $argument in --export=*) export RUN_OFFSET=${argument##*=};; *) script=$argument;; esac
done
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' $script)
if [ -z "$last" ]; then echo 7; exit; fi
for number in $(seq 0 $last); do
  SLURM_NODELIST=here SLURM_ARRAY_TASK_ID=$number bash $script >> $SBATCH_LOG 2>&1 || exit 1
done
echo 7
"""
SRUN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do [ "$1" = -n ] && shift; shift; done
exec "$@"
"""
SCONTROL = "#!/bin/sh\necho here\n"


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(splitting, "SPLIT_BYTES", 4000)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"Text {i}. " * (i % 20 + 1)}) + "\n"
                            for i in range(200)))  # fmt: skip
    return path


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*")
            if p.is_file() and p.name != "preparation.json"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "slurm"])
def test_an_engine_gives_the_same_bytes(corpus, tmp_path, engine, monkeypatch, capsys):
    pytest.importorskip("datatrove")
    options = ["jsonl", str(corpus), "--max-documents", "150", "--val-fraction", "0.1"]
    assert main([*options, "--out", str(tmp_path / "one"), "--workers", "1"]) == 0
    more = ["--tasks", "2"]
    if engine == "slurm":
        tools = tmp_path / "tools"
        tools.mkdir()
        for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
        monkeypatch.setenv("PATH", path)
        monkeypatch.setenv("SBATCH_LOG", str(tmp_path / "log"))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
        more += ["--engine-option", "time=1:00:00", "--engine-option", "partition=cpu"]
    assert main([*options, "--out", str(tmp_path / "two"), "--engine", engine, *more]) == 0
    assert ("submitted" in capsys.readouterr().out) == (engine == "slurm")
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert Manifest.read(tmp_path / "two").total("documents") == 150
    assert not (tmp_path / "two.partial").exists()


def test_engines_that_are_not_there_are_said(corpus, tmp_path, source):
    pytest.importorskip("datatrove")
    prepare = data_prep.prepare
    jsonl = data_prep.sources.jsonl(corpus)
    with pytest.raises(DataError, match="no engine 'spark': use local, slurm or ray"):
        prepare(jsonl, tmp_path / "out", engine="spark")
    with pytest.raises(DataError, match="slurm executor: .*'time'.*see --engine-option"):
        prepare(jsonl, tmp_path / "out", engine="slurm")
    with pytest.raises(DataError, match="other processes cannot read the source memory"):
        prepare(source(["x"]), tmp_path / "out", engine="local")
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(DataError, match="engine ray needs Ray: run `pip install"):
            prepare(jsonl, tmp_path / "out", engine="ray")


def request(**options):
    given = {"text": "s3://b/text", "output": "s3://b/tokens", **options}
    role = "arn:aws:iam::123456789012:role/r"
    return processing.request("owt", image="i" * 10, role=role, **given)


def test_a_processing_job_is_as_the_service_wants_it():
    session = pytest.importorskip("botocore.session").Session()
    from botocore.validate import ParamValidator

    found = request(arguments=["--dedup", "exact"])
    model = session.get_service_model("sagemaker").operation_model("CreateProcessingJob")
    report = ParamValidator().validate(found, model.input_shape)
    assert not report.has_errors(), report.generate_report()
    with pytest.raises(ConfigError, match="text is '/data': give a prefix in S3"):
        request(text="/data")
    with pytest.raises(ConfigError, match="source is 'hf'"):
        request(source="hf")


def test_a_processing_job_gives_the_same_bytes(corpus, tmp_path, monkeypatch, capsys):
    place = tmp_path / "opt"
    (place / "in").mkdir(parents=True)
    (place / "in/a.jsonl").write_bytes(corpus.read_bytes())
    monkeypatch.setattr(processing, "INPUT", str(place / "in"))
    monkeypatch.setattr(processing, "OUTPUT", str(place / "out"))
    monkeypatch.chdir(tmp_path)
    found = request(arguments=["--workers", "1"])["AppSpecification"]
    assert found["ContainerEntrypoint"] == ["python", "-m", "data_prep"]
    assert main(found["ContainerArguments"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = data_prep.prepare(data_prep.sources.jsonl(corpus), tmp_path / "one", progress=False)
    assert last["event"] == "prepared" and last["fingerprint"] == expected.fingerprint
    assert Manifest.read(place / "out/owt").fingerprint == expected.fingerprint
