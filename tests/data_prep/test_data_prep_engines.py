"""Engines and SageMaker Processing jobs give the bytes of a single machine."""

import json
import os
import sys
from pathlib import Path

import pytest

import data_prep
from data_prep import output, processing, storage_paths
from data_prep.__main__ import main
from data_prep.sources import source as splitting
from nearlinear.data.format import Manifest
from nearlinear.errors import ConfigError, DataError
from tests.support.preparing import OPTIONS, contents

# Stand-in for sbatch that runs the tasks of an array one after another.
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


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "slurm"])
def test_engine_gives_the_same_bytes_as_workers(corpus, tmp_path, engine, monkeypatch, capsys):
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


def run(step, rank=0, tasks=1):
    assert list(step.run(None, rank, tasks)) == []


def make_plan(path, toy_vocab, **options):
    settings = {"val_fraction": 0.2, "seed": 0, "dedup": None, "max_documents": None,
                "max_tokens": None, "shard_tokens": 64 * 2**20, **options}  # fmt: skip
    return data_prep.plan.PreparationPlan.create(
        data_prep.sources.jsonl(path), data_prep.tokenizer.load(toy_vocab), **settings
    )


@pytest.mark.parametrize("tasks", [[0], [1, 0], [2, 0, 1]])
def test_engine_tasks_stop_at_a_limit(corpus, tmp_path, toy_vocab, tasks):
    engines = pytest.importorskip("data_prep.engines", exc_type=ImportError)
    plan = make_plan(corpus, toy_vocab, max_documents=60)
    with output.staging(tmp_path / "two", plan, False) as (folder, _):
        for rank in tasks:
            run(engines.ProcessSplits(folder, ("tokenizers",)), rank, len(tasks))
        done = len(list((folder / "splits").subfolders()))
        assert done < len(plan.splits) and (len(tasks) > 1 or done == 2)
        run(engines.MergeSplits(folder, tmp_path / "two"))
    data_prep.prepare(data_prep.sources.jsonl(corpus), tmp_path / "one", tokenizer=toy_vocab,
                      max_documents=60, **OPTIONS)  # fmt: skip
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_engine_merge_names_missing_split(corpus, tmp_path, toy_vocab):
    engines = pytest.importorskip("data_prep.engines", exc_type=ImportError)
    with output.staging(tmp_path / "out", make_plan(corpus, toy_vocab), False) as (folder, _):
        run(engines.ProcessSplits(folder, ("tokenizers",)), 0, 2)
        with pytest.raises(
            DataError, match=r"split 1 of .* is not done: read its logs in .*out\.logs"
        ):
            run(engines.MergeSplits(folder, tmp_path / "out"))


def test_engine_task_finds_input_from_any_working_directory(
    corpus, tmp_path, toy_vocab, monkeypatch
):
    engines = pytest.importorskip("data_prep.engines", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    plan = make_plan(corpus.name, toy_vocab)
    with output.staging(tmp_path / "out", plan, False) as (folder, _):
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        run(engines.ProcessSplits(folder, ("tokenizers",)))
        run(engines.MergeSplits(folder, tmp_path / "out"))
    assert Manifest.read(tmp_path / "out").plan["inputs"][0]["path"] == corpus.name


def test_only_slurm_merge_takes_the_lock(corpus, tmp_path, toy_vocab, monkeypatch):
    engines = pytest.importorskip("data_prep.engines", exc_type=ImportError)
    monkeypatch.setattr(output, "_LOCK_TIMEOUT", 0)
    launched = {}

    class Executor:
        def __init__(self, steps, **options):
            self.step = steps[0]

        def run(self):
            launched[engine] = self.step

    monkeypatch.setattr(engines, "_executor_class", lambda engine: Executor)
    with output.staging(tmp_path / "out", make_plan(corpus, toy_vocab), False) as (folder, _):
        for engine in ("slurm", "local", "ray"):
            engines.launch(engine, folder, storage_paths.absolute_path(tmp_path / "out"), 1)
        run(engines.ProcessSplits(folder, ("tokenizers",)))
        with pytest.raises(output.LockBusyError, match="another process is preparing"):
            run(launched["slurm"])
        run(launched["local"])
    assert not launched["ray"].takes_lock and (tmp_path / "out/index.json").is_file()


def test_unknown_or_missing_engines_are_named(corpus, tmp_path, source):
    pytest.importorskip("datatrove")
    prepare = data_prep.prepare
    jsonl = data_prep.sources.jsonl(corpus)
    with pytest.raises(DataError, match="no engine 'spark': use local, slurm or ray"):
        prepare(jsonl, tmp_path / "out", engine="spark")
    with pytest.raises(DataError, match="slurm executor: .*'time'.*see --engine-option"):
        prepare(jsonl, tmp_path / "out", engine="slurm")
    with pytest.raises(DataError, match="source memory cannot be read by other processes"):
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


def test_processing_request_matches_the_service_model():
    session = pytest.importorskip("botocore.session").Session()
    from botocore.validate import ParamValidator

    found = request(arguments=["--dedup", "exact"])
    model = session.get_service_model("sagemaker").operation_model("CreateProcessingJob")
    report = ParamValidator().validate(found, model.input_shape)
    assert not report.has_errors(), report.generate_report()
    with pytest.raises(ConfigError, match="text is '/data': give an S3 prefix"):
        request(text="/data")
    with pytest.raises(ConfigError, match="source is 'hf'"):
        request(source="hf")


def test_processing_job_gives_the_same_dataset(corpus, tmp_path, monkeypatch, capsys):
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
