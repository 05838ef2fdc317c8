"""The command line: help, one-line errors, and training on several processes."""

import json
import shutil
import subprocess
import sys
import tomllib

import pytest

from nearlinear import cli
from nearlinear.config.parallel import schema
from tests.support.command_line import nearlinear, write


def refusal(capsys, *arguments):
    """Run a command that must fail and return its single line on stderr."""
    assert cli.main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, (out, err)
    return err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["plan", "--help"], ["env", "--help"]]
)
def test_help_is_printed(arguments):
    shown = nearlinear(*arguments)
    assert shown.returncode == 0 and "usage: nearlinear" in shown.stdout


def test_help_imports_nothing_heavy():
    """Imports dominate the time of --help, so torch, numpy and rich are not among them."""
    code = (
        "import sys; from nearlinear import cli\n"
        "try: cli.main(['train', '--help'])\n"
        "except SystemExit: print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.stdout.strip().endswith("[]")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "did you mean 'train'?"),
        (["checkpoint", "verfy"], "did you mean 'verify'?"),
        (["qqq"], "choose from new, data, train"),
    ],
)
def test_misspelled_command_gets_a_suggestion(arguments, words, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2 and words in capsys.readouterr().err


def test_data_command_is_that_of_data_prep(tmp_path, capsys):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("One document of a folder of text.")
    out = str(tmp_path / "tokens")
    assert cli.main(["data", "text", str(text), "--out", out, "--val-fraction", "0"]) == 0
    assert cli.main(["data", "verify", out]) == 0
    assert cli.main(["data", "verify", str(tmp_path / "none")]) == 2
    assert "error: " in capsys.readouterr().err


def test_print_config_reads_back(small_run, tmp_path, capsys):
    path = write(small_run, tmp_path)
    assert cli.main(["train", str(path), "--set", "train.steps=9", "--print-config"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["train"]["steps"] == 9 and printed["batch"]["accumulation"] == 2


def test_env_prints_versions_and_no_secrets():
    shown = nearlinear("env", HF_TOKEN="hush", NCCL_DEBUG="INFO")
    assert shown.returncode == 0
    for words in ("torch", "python", "NCCL_DEBUG", "backends"):
        assert words in shown.stdout
    assert "hush" not in shown.stdout


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["optimzer.lr=1"], "'optimzer': did you mean 'optimizer'"),
        (["parallel.hybrid_shard_degre=2"], "did you mean 'hybrid_shard_degree'"),
        (["run.nproc=4", "parallel.hybrid_shard_degree=3"], "allowed are 1, 2, 4"),
        (["data.path=nowhere"], "nowhere"),
        (["data.path="], "nearlinear data"),
        (["data.sequence_length=1024"], "longer than the model's context of 256 tokens"),
        (["model.overrides.vocab_size=10"], "holds ids up to"),
        (["data.resume=nowhere.json"], "no such file"),
        (["train.steps=soon"], "train.steps = 'soon': expected an integer"),
        (["model.overrides.n_positions=abc"], "n_positions = 'abc': expected an integer"),
        (["model.overrides.vocab_size=abc"], "vocab_size = 'abc': expected an integer"),
        (["model.context=64", "model.overrides.n_positions=32"], "two names for one setting"),
        (["model.overrides.n_embd=-4"], "the model cannot be built"),
        (["optimizer.lr=nan"], "optimizer.lr = nan"),
        (["optimizer.beta1=1.5"], "optimizer.beta1 = 1.5: must be from 0 to 1"),
        (["batch.micro_batch_size=1e30"], "must be at most 2^62"),
        (["batch.micro_batch_size=1e10"], "more than 2^31 samples"),
        (["run.folder=/proc/nowhere"], "run.folder = /proc/nowhere cannot be written"),
        (["run.peak_tflops=-1"], "run.peak_tflops = -1.0"),
        (["parallel.communication_backend=mpi"], "Allowed here: auto, nearlinear, gloo"),
        (["parallel.context_parallel_degree=2", "run.nproc=3"], "does not divide"),
        (["parallel.tensor_parallel_degree=4", "run.nproc=4"], "does not divide n_head = 2"),
        (["parallel.expert_parallel_degree=2", "run.nproc=2"], "gpt2-tiny has no experts"),
        (["parallel.pipeline_parallel_degree=4", "run.nproc=4"], "has only 2 layers"),
        (
            ["parallel.pipeline_parallel_degree=2", "run.nproc=2", "parallel.microbatches=3"],
            "parallel.microbatches = 3 equal parts: make it a multiple",
        ),
        (["parallel.placement_strategy=near"], "placement_strategy = 'near': allowed are"),
        (["parallel.pipeline=zigzag"], "pipeline = 'zigzag': allowed are"),
        (["moe.moe_load_balancing=fair"], "moe_load_balancing = 'fair': allowed are"),
        (["nonsense"], "expected key=value"),
    ],
)
def test_user_error_is_one_line(small_run, tmp_path, capsys, settings, words):
    flags = [part for setting in settings for part in ("--set", setting)]
    assert words in refusal(capsys, "train", write(small_run, tmp_path), *flags)


def test_exploding_loss_stops_the_run(small_run, tmp_path):
    settings = "optimizer.lr=1e3 optimizer.clip=0 optimizer.warmup_steps=0 train.steps=50"
    flags = [part for setting in settings.split() for part in ("--set", setting)]
    failed = nearlinear("train", write(small_run, tmp_path), *flags)
    assert failed.returncode == 2 and "Traceback" not in failed.stderr
    assert failed.stderr.count("error: ") == 1 and "lower optimizer.lr" in failed.stderr


def test_resume_after_the_last_step_is_an_error(small_run, tmp_path, capsys):
    (tmp_path / "state.json").write_text('{"step": 6, "loader": {}}')
    flags = ["--set", f"data.resume={tmp_path}/state.json"]
    assert "raise train.steps" in refusal(capsys, "train", write(small_run, tmp_path), *flags)


def test_alias_in_a_setting_overrides_the_config_file(small_run, tmp_path, capsys):
    small_run["parallel"] = {"hybrid_shard_degree": 4}
    flags = ["--set", "parallel.sharded_data_parallel_degree=2", "--print-config"]
    assert cli.main(["train", str(write(small_run, tmp_path)), *flags]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["parallel"]["hybrid_shard_degree"] == 2


def test_missing_config_file_is_an_error(tmp_path, capsys):
    assert "no such config file" in refusal(capsys, "train", tmp_path / "none.toml")


def test_unusable_data_is_an_error(small_run, token_folder, tmp_path, capsys):
    path = write(small_run, tmp_path)
    (tmp_path / "empty").mkdir()
    assert "index.json" in refusal(capsys, "train", path, "--set", f"data.path={tmp_path}/empty")
    broken = tmp_path / "broken"
    shutil.copytree(token_folder, broken)
    shard = broken / "train" / "shard-00000.bin"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    message = refusal(capsys, "train", path, "--set", f"data.path={broken}")
    assert "train/shard-00000.bin" in message


def test_debug_shows_the_traceback(small_run, tmp_path):
    with pytest.raises(schema.ConfigError):
        cli.main(["train", "--debug", str(write(small_run, tmp_path)), "--set", "a.b=1"])


@pytest.mark.slow
def test_training_on_several_processes(small_run, tmp_path):
    small_run["batch"] = {"micro_batch_size": 2, "sequences": 16}
    path = write(small_run, tmp_path)
    degree = "parallel.hybrid_shard_degree=2"
    checked = ("--set", "train.self_check=always", "--set", f"data.cache={tmp_path / 'cache'}")
    done = nearlinear("train", path, "--nproc", 2, "--set", degree, *checked)
    assert done.returncode == 0, done.stderr
    assert "self-check: a small twin equals one process" in done.stderr
    assert "2 ranks = 2 shard" in done.stdout
    assert done.stdout.count("\nstep=") == 6
    folder = tmp_path / "run"
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert (folder / "data_state.json").exists() and (folder / "loss.png").stat().st_size > 5000
    written = tomllib.loads((folder / "config.toml").read_text())
    assert written["parallel"]["hybrid_shard_degree"] == 2
    # under torchrun the command joins its rank, which gives the same losses as two
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += ["-m", "nearlinear.cli", "train", str(path)]
    command += ["--set", "parallel.hybrid_shard_degree=auto"]
    joined = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert joined.returncode == 0, joined.stderr
    again = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows]
    assert [row["loss"] for row in again] == pytest.approx(losses, abs=1e-5)
    assert [row["batch_id"] for row in again] == [row["batch_id"] for row in rows]
    assert "hybrid_shard_degree = auto: 1 (1 needs 0." in joined.stderr
    written = tomllib.loads((folder / "config.toml").read_text())
    assert written["parallel"]["hybrid_shard_degree"] == 1


@pytest.mark.slow
def test_failed_rank_ends_the_job_with_one_error(small_run, tmp_path):
    """The launcher prints the error of the failed rank once and stops the other rank."""
    path = write(small_run, tmp_path)
    failed = nearlinear("train", path, "--nproc", 2, "--set", "model.overrides.n_head=7")
    assert failed.returncode == 2
    errors = [text for text in failed.stderr.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1 and "the model cannot be built" in errors[0]
    assert "Traceback" not in failed.stderr
