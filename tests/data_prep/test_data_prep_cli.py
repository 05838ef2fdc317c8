import errno
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep import report
from data_prep.__main__ import _source, main
from data_prep.arguments import parser

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"Text {i}. " * (i % 50 + 1)}) + "\n"
                            for i in range(400)))  # fmt: skip
    return path


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_cli_prepares_verifies_and_inspects(capsys, corpus, tmp_path):
    out = tmp_path / "out"
    code, said, progress = run(capsys, "jsonl", corpus, "--out", out, "--val-fraction", 0.05)
    assert code == 0
    assert "tokenizer gpt2" in said and "bytes of text per token" in said
    assert said.splitlines()[-2] == f"look inside: nearlinear data inspect {out}"
    assert said.splitlines()[-1] == f"train on it: nearlinear train --set data.path={out}"
    assert "jsonl: 400 documents" in said and "tokens/s" in said and not progress

    code, said, _ = run(capsys, "verify", out)
    assert code == 0 and said.startswith(f"ok: {out}, ")

    code, said, _ = run(capsys, "inspect", out)
    assert code == 0 and "\nText 0." in said
    assert "tokens per document" in said and "####" in said

    code, said, notes = run(capsys, "jsonl", corpus, "--out", out, "--val-fraction", 0.05)
    assert code == 0 and "nothing to do" in notes and "look inside:" in said


def test_cli_verify_names_altered_shard(capsys, corpus, tmp_path):
    out = tmp_path / "out"
    run(capsys, "jsonl", corpus, "--out", out, "--shard-tokens", 5000)
    shard = out / "train/shard-00001.bin"
    raw = bytearray(shard.read_bytes())
    raw[1234] ^= 32
    shard.write_bytes(raw)
    code, said, error = run(capsys, "verify", out)
    assert code == 2 and said == ""
    assert error.startswith(f"error: {shard} is altered") and error.count("\n") == 1


def test_cli_names_the_full_file_system(capsys, monkeypatch, corpus, tmp_path):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")  # as a write to an open file

    monkeypatch.setattr("data_prep.build.prepare", full)
    code, _, error = run(capsys, "jsonl", corpus, "--out", tmp_path / "out")
    assert code == 2 and f"no space is left on the file system of {tmp_path / 'out'}: free" in error


@pytest.mark.parametrize("name", ["index.json", "preparation.json", "tokenizer/tokenizer.json",
                                  "tokenizer/tokenizer_config.json"])  # fmt: skip
def test_cli_verify_names_every_flipped_bit_of_metadata(capsys, corpus, toy_vocab, tmp_path, name):
    out = tmp_path / "out"
    run(capsys, "jsonl", corpus, "--out", out, "--tokenizer", toy_vocab)
    assert run(capsys, "verify", out)[0] == 0
    intact, draw = (out / name).read_bytes(), random.Random(name)
    for _ in range(600):
        raw = bytearray(intact)
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        (out / name).write_bytes(raw)
        code, _, error = run(capsys, "verify", out)
        assert code == 2 and f"error: {out / name} is " in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["jsonl", "none.jsonl"], "no input file none.jsonl"),
        (["jsonl", "{corpus}", "--text-field", "body"], "corpus.jsonl:1 has no field 'body'"),
        (["jsonl", "{corpus}", "--tokenizer", "no.json"], "no tokenizer at no.json"),
        (["jsonl", "{corpus}", "--val-fraction", "2"], "val_fraction is 2.0"),
        (["jsonl", "{corpus}", "--max-documents", "0"], "max_documents is 0"),
        (["jsonl", "{corpus}", "--engine", "slurm", "--tasks", "-5"], "tasks is -5: give at least"),
        (
            ["jsonl", "{corpus}", "--engine", "slurm", "--workers", "4"],
            "workers has no effect with",
        ),
        (["jsonl", "{corpus}", "--tasks", "4"], "tasks has no effect without an engine"),
        (
            ["jsonl", "{corpus}", "--engine-option", "time=1"],
            "engine_options has no effect without",
        ),
        (["text", "{empty}"], "no .txt or .md files under"),
        (["verify", "none"], "no token shards at none"),
        (["inspect", "{empty}"], "holds no index.json"),
        (["jsonl", "{corpus}", "--out", "{corpus}"], "is not a folder of token shards"),
        (["jsonl", "{corpus}", "--out", "{corpus}/x"], "Not a directory"),
    ],
)
def test_cli_user_errors_are_one_line_with_exit_code_2(capsys, corpus, tmp_path, arguments, match):
    (tmp_path / "empty").mkdir()
    names = {"corpus": corpus, "empty": tmp_path / "empty"}
    arguments = [argument.format(**names) for argument in arguments]
    if arguments[0] in ("jsonl", "text") and "--out" not in arguments:
        arguments += ["--out", str(tmp_path / "out")]
    code, said, error = run(capsys, *arguments)
    assert code == 2 and said == ""
    assert error.startswith("error: ") and error.count("\n") == 1 and match in error
    assert not (tmp_path / "out").exists()


def test_cli_debug_raises_with_traceback(corpus, tmp_path):
    from nearlinear.errors import DataError

    with pytest.raises(DataError):
        main(["verify", str(tmp_path), "--debug"])


def test_cli_internal_errors_keep_their_traceback(monkeypatch, corpus, tmp_path):
    monkeypatch.setattr("data_prep.build.prepare", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["jsonl", str(corpus), "--out", str(tmp_path / "out")])


@pytest.mark.parametrize("package", ["nearlinear", "tokenizers"])
def test_cli_names_missing_package(package, corpus, tmp_path):
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from data_prep.__main__ import main\n"
        f"sys.exit(main(['jsonl', {str(corpus)!r}, '--out', {str(tmp_path / 'out')!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"the package {package} is not installed" in done.stderr and "pip inst" in done.stderr


def test_cli_plan_prints_input_splits_without_writing(capsys, corpus, tmp_path):
    code, said, _ = run(capsys, "plan", "jsonl", corpus)
    assert code == 0 and "jsonl: 1 inputs in 1 splits" in said
    code, said, _ = run(capsys, "plan", "jsonl", corpus, "--json")
    size = corpus.stat().st_size
    assert json.loads(said)["splits"] == [[0, 0, size, size]]
    assert [p.name for p in tmp_path.iterdir()] == [corpus.name]


def test_cli_plan_rejects_options_of_prepare(capsys, corpus):
    for option in (["--workers", "2"], ["--out", "x"], ["--max-tokens", "9"], ["--overwrite"]):
        with pytest.raises(SystemExit):
            main(["plan", "jsonl", str(corpus), *option])
        assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize("source", [["hf", "a/b"], ["openwebtext"]])
def test_cli_passes_revision_to_hub_sources(source):
    options = parser().parse_args(["prepare", *source, "--revision", "5e3b0cc"])
    assert _source(options).revision() == "5e3b0cc"


@pytest.mark.parametrize("out", ["d/out", "s3://b/out"])
def test_cli_prints_logs_folder_of_submitted_preparation(
    monkeypatch, capsys, corpus, tmp_path, out
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("data_prep.build.prepare", lambda *a, **k: None)
    logs = str(tmp_path / ("d/out.logs" if out == "d/out" else "out.logs"))
    code, said, _ = run(capsys, "jsonl", corpus, "--out", out, "--engine", "slurm", "--json")
    assert code == 0 and json.loads(said) == {"event": "submitted", "folder": out, "logs": logs}
    code, said, _ = run(capsys, "jsonl", corpus, "--out", out, "--engine", "slurm")
    assert code == 0 and said.startswith("submitted: ") and said.endswith(f" logs are in {logs}\n")


def test_cli_json_prints_one_object_per_line(capsys, corpus, tmp_path):
    out = tmp_path / "out"
    code, said, _ = run(capsys, "prepare", "jsonl", corpus, "--out", out, "--json")
    lines = [json.loads(line) for line in said.splitlines()]
    while lines[0]["event"] == "progress":  # of a loaded machine
        del lines[0]
    assert code == 0 and [line["event"] for line in lines] == ["done", "prepared"]
    assert lines[0]["documents"] == 400 and lines[0]["splits"] == lines[0]["of_splits"] == 1
    code, said, _ = run(capsys, "verify", out, "--json")
    assert code == 0 and json.loads(said)["fingerprint"] == lines[1]["fingerprint"]
    code, said, _ = run(capsys, "inspect", out, "--json")
    found = json.loads(said)
    assert code == 0 and found["fingerprint"] == lines[1]["fingerprint"]
    assert sum(side["documents"] for side in found["splits"].values()) == 400
    assert found["first_document"] == report.first_document(out)
    assert found["lengths"]["longest"] == report.document_lengths(out).max()
    code, said, _ = run(capsys, "export", out, "--format", "nanogpt", "--out", tmp_path / "n",
                        "--json")  # fmt: skip
    assert code == 0 and json.loads(said)["tokens"] == lines[0]["tokens"]
    code, _, error = run(capsys, "prepare", "jsonl", corpus, "--engine-option", "time")
    assert code == 2 and "--engine-option time has no value: write KEY=VALUE" in error


def test_cli_interrupt_exits_with_130(monkeypatch, capsys, corpus, tmp_path):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("data_prep.build.prepare", interrupted)
    code, _, error = run(capsys, "jsonl", corpus, "--out", tmp_path / "out")
    assert code == 130 and error.startswith("interrupted")


def test_cli_help_shows_examples_without_heavy_imports():
    code = (
        "import runpy, sys\n"
        "sys.argv = ['data_prep', '--help']\n"
        "try: runpy.run_module('data_prep', run_name='__main__')\n"
        "except SystemExit as stop: code = stop.code\n"
        "heavy = {'numpy', 'torch', 'tokenizers', 'datasets', 'rich'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "nearlinear data prepare botocore" in done.stdout


def test_cli_runs_as_a_module(corpus, tmp_path):
    command = [sys.executable, "-m", "data_prep", "text", str(tmp_path / "none"), "--out", "x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no input file") and "Traceback" not in done.stderr
    done = subprocess.run([*command[:3], "nonsense"], capture_output=True, text=True,
                          cwd=REPOSITORY, check=False)  # fmt: skip
    assert done.returncode == 2 and "invalid choice" in done.stderr


def test_histogram_counts_every_document():
    lengths = np.array([1, 2, 3, 4, 7, 8, 1023, 1024, 1024])
    lines = report.histogram(lengths)
    counts = [int(line.split()[-3].replace(",", "")) for line in lines[:-1]]
    assert counts == [1, 2, 2, 1, 0, 0, 0, 0, 0, 1, 2]
    assert "longest 1,024" in lines[-1]
