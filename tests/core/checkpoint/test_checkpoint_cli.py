"""``nearlinear checkpoint``: inspect, verify, diff, and export."""

import json
import os
import pickle
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import nearlinear as nl
from nearlinear import cli
from tests.support import indexes, parity


def train_and_save(rank, folder, config, rate=1e-3):
    nl.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("llama")
    model = nl.shard(nl.transform(model))
    optimizer = parity.adamw(model, rate)
    for step in (1, 2):
        for batch in nl.accumulate(model, [parity.rows(step)]):
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        nl.save(f"{folder}/step-{step:08d}", model, optimizer, step=step)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Folder with a run on two ranks, and a run on a single rank with another learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    nl.spmd.run(train_and_save, 2, args=(folder / "a", {"tensor_parallel_degree": 2}))
    nl.spmd.run(train_and_save, 1, args=(folder / "b", {}, 1e-2))
    return folder


@pytest.fixture
def run(written, tmp_path):
    shutil.copytree(written, tmp_path / "runs")
    return tmp_path / "runs" / "a"


def command(capsys, *arguments):
    """Run a checkpoint command; return the exit code and the lines of stdout and stderr."""
    capsys.readouterr()
    code = cli.main(["checkpoint", *map(str, arguments)])
    output = capsys.readouterr()
    return code, output.out.splitlines(), output.err.splitlines()


def test_inspect_reports_tensors_files_and_sizes(run, capsys):
    code, (first, second), _ = command(capsys, "inspect", run, "--json")
    report = json.loads(second)
    assert code == 0 and json.loads(first)["step"] == 1 and report["step"] == 2
    assert report["world"] == 2 and report["files"] == 2
    model = parity.build("llama")
    elements = sum(p.numel() for p in model.parameters())
    assert report["tensors"]["model"]["elements"] == elements
    assert report["tensors"]["model"]["bytes"] == 4 * elements
    assert report["largest"][0]["shape"] == [97, 32]
    assert report["bytes"] == sum(f.stat().st_size for f in run.glob("step-00000002/*.safetensors"))
    code, lines, _ = command(capsys, "inspect", run / "step-00000001")
    assert code == 0 and "after step 1, saved by 2 ranks" in lines[0]
    assert any(line.split()[:2] == ["dtypes", "float32"] for line in lines)


def test_inspect_shows_model_and_layout_of_the_run(run, capsys):
    about = {"model": {"architectures": ["LlamaForCausalLM"]}, "layout": {"shard": 1, "tensor": 2}}
    indexes.edit_index(run / "step-00000002", lambda data: data["values"].update(about=about))
    _, lines, _ = command(capsys, "inspect", run / "step-00000002")
    assert lines[0].endswith("saved by 2 ranks (tensor 2)") and "LlamaForCausalLM" in lines[1]


def test_verify_accepts_intact_checkpoints(run, capsys):
    (run / "step-00000003").mkdir()  # unfinished: not a checkpoint
    code, lines, _ = command(capsys, "verify", run, run.parent / "b")
    assert code == 0 and [line[:2] for line in lines] == ["ok"] * 4
    assert "step 2, 2 files" in lines[1]


def test_verify_reports_faults_of_all_checkpoints(run, capsys):
    first, second = run / "step-00000001", run / "step-00000002"
    zero, one = sorted(first.glob("*.safetensors"))
    data = bytearray(zero.read_bytes())
    data[-1] ^= 1
    zero.write_bytes(data)
    one.unlink()
    code, lines, _ = command(capsys, "verify", run)
    assert code == 1
    assert [line for line in lines if line.startswith("FAULT")] == [
        f"FAULT {zero} has changed since it was written: its SHA-256 is different",
        f"FAULT {one} is missing",
    ]
    assert any(line.startswith(f"ok    {second}") for line in lines)
    assert lines[-1].startswith("1 of 2 checkpoints are damaged")


def test_verify_compares_tensors_with_the_index(run, capsys):
    folder = run / "step-00000002"
    path = sorted(folder.glob("*.safetensors"))[0]
    values = load_file(path)
    names = sorted(values)
    removed = values.pop(names[0])
    values["unknown"] = removed
    values[names[1]] = values[names[1]].double()
    save_file(values, path, indexes.binding(folder))
    indexes.update_hash(folder, path)
    code, lines, _ = command(capsys, "verify", folder)
    assert code == 1 and len(lines) == 4
    assert f"has no {names[0]}, which is in the index" in lines[0]
    assert "has unknown, which is not in the index" in lines[1]
    assert f"has {names[1]} as float64" in lines[2]
    path.write_bytes(path.read_bytes()[:-8])
    _, lines, _ = command(capsys, "verify", folder)
    assert "bytes instead of" in lines[0] and "is not a complete safetensors file" in lines[1]


def test_verify_without_checkpoint_exits_with_2(run, capsys):
    (run / "empty").mkdir()
    assert command(capsys, "verify", run / "empty")[0] == 2
    code, _, (output,) = command(capsys, "verify", run / "nowhere")
    assert code == 2 and "does not exist" in output


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_commands_never_unpickle(run, tmp_path, capsys):
    marker, folder = tmp_path / "exploded", run / "step-00000002"
    bomb, other = pickle.dumps(Bomb(marker)), run / "step-00000001"
    (run / "config.toml").write_text("")
    for name in sorted(path.name for path in folder.iterdir()):
        copy = shutil.copytree(folder, tmp_path / f"bombed {name}")
        (copy / name).write_bytes(bomb)
        for rehashed in (False, True):
            if rehashed and name != "index.json":
                indexes.update_hash(copy, copy / name)
            assert command(capsys, "verify", copy)[0] == 1
            assert command(capsys, "diff", copy, other)[0] == 2
            config = parity_config(tmp_path)
            assert command(capsys, "export", copy, tmp_path / "out", "--config", config)[0] == 2
    bombed = tmp_path / "config.json"
    bombed.write_bytes(bomb)
    assert command(capsys, "export", folder, tmp_path / "out", "--config", bombed)[0] == 2
    assert not marker.exists() and not (tmp_path / "out").exists()
    pickle.loads(bomb)  # the pickle itself works
    assert marker.exists()


def test_verify_rejects_index_paths_outside_the_folder(run, capsys):
    folder = run / "step-00000002"

    def leave(data):
        data["files"]["../a"] = {"bytes": 0, "sha256": ""}

    indexes.edit_index(folder, leave)
    code, (output, _), _ = command(capsys, "verify", folder)
    assert code == 1 and "'../a' is no safetensors file of this folder" in output


def test_diff_lists_tensors_by_decreasing_difference(run, capsys):
    one, two = run / "step-00000001", run / "step-00000002"
    assert command(capsys, "diff", one, one)[:2] == (0, ["no difference"])
    code, lines, _ = command(capsys, "diff", one, two, "--all", "--only", "model/")
    assert code == 1 and len(lines) == len(list(parity.build("llama").parameters()))
    shares = [float(line.split()[-2]) for line in lines]
    assert shares == sorted(shares, reverse=True)
    assert command(capsys, "diff", one, two, "--only", "model/", "--atol", "1")[0] == 0
    code, lines, _ = command(capsys, "diff", one, two)
    assert lines[-1].startswith("and ") and lines[-1].endswith("more: --all shows them")


def test_diff_reports_magnitude_across_layouts(run, capsys):
    """AdamW steps with a ten times smaller learning rate give a known difference."""
    other = run.parent / "b" / "step-00000001"
    code, lines, _ = command(
        capsys, "diff", run / "step-00000001", other, "--only", "model/model.norm.weight"
    )
    assert code == 1
    assert float(lines[0].split("at most ")[1].split(",")[0]) == pytest.approx(9e-3, rel=0.05)
    again = shutil.copytree(other, other.with_name("again"))
    path = next(again.glob("*.safetensors"))
    values = load_file(path)
    values.pop("model/model.norm.weight")
    shortened = [name for name in values if "lm_head.weight" in name and values[name].dim()]
    for name in shortened:
        values[name] = values[name][:-1].contiguous()
    save_file(values, path)

    def change(data):
        del data["tensors"]["model/model.norm.weight"]
        for name in shortened:
            entry = data["tensors"][name]
            entry["shape"][0] = entry["pieces"][path.name][0]["shape"][0] = 96

    indexes.edit_index(again, change)
    indexes.bind_files(again)
    code, lines, _ = command(capsys, "diff", other, again, "--only", "model/")
    assert code == 1 and set(lines) == {
        f"model/model.norm.weight: only in {other}",
        "model/lm_head.weight: has shapes [97, 32] and [96, 32]",
    }


def parity_config(folder) -> str:
    parity.build("llama").config.save_pretrained(folder / "config")
    return str(folder / "config" / "config.json")


def test_export_with_hugging_face_config(run, tmp_path, capsys):
    path, config = tmp_path / "hf", parity_config(tmp_path)
    code, lines, _ = command(capsys, "export", run, path, "--config", config)
    assert code == 0 and "step-00000002" in lines[0] and "--tokenizer" in lines[1]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path)
    again = {}

    def load(rank):
        nl.init({})
        model = nl.shard(parity.build("llama"))
        nl.load(run / "step-00000002", model)
        again.update(parity.whole(model, torch.Tensor.detach))

    nl.spmd.run(load, 1)
    for name, value in loaded.named_parameters():
        assert torch.equal(value, again[name])
    code, _, (output,) = command(capsys, "export", run, path, "--config", config)
    assert code == 2 and "already exists" in output
    options = ("--overwrite", "--dtype", "bfloat16")
    assert command(capsys, "export", run, path, "--config", config, *options)[0] == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert loaded.dtype == torch.bfloat16


def test_export_requires_a_matching_model_config(run, tmp_path, capsys):
    indexes.edit_index(run / "step-00000002", lambda data: data["values"].pop("about"))
    code, _, (output,) = command(capsys, "export", run, tmp_path / "hf")
    assert code == 2 and "--config RUN/config.toml" in output
    described = json.loads(parity.build("llama").config.to_json_string())
    indexes.edit_index(
        run / "step-00000002", lambda data: data["values"].update(about={"model": described})
    )
    indexes.bind_files(run / "step-00000002")
    assert command(capsys, "export", run, tmp_path / "hf")[0] == 0
    described["num_hidden_layers"] = 3
    indexes.edit_index(
        run / "step-00000002", lambda data: data["values"].update(about={"model": described})
    )
    indexes.bind_files(run / "step-00000002")
    code, _, (output,) = command(capsys, "export", run, tmp_path / "other")
    assert code == 2 and "is only in the config of" in output


@pytest.mark.parametrize("has_data", [True, False])
def test_export_uses_config_and_tokenizer_of_the_run(small_run, tmp_path, capsys, has_data):
    """Find the model in the config.toml of the run, and the tokenizer in its data folder."""
    run = tmp_path / "run"
    small_run["checkpoint"] = {"folder": str(run / "checkpoints")}
    small_run["train"]["steps"] = 2
    results = nl.spmd.run(train, 2, args=(small_run,))
    if not has_data:
        text = (run / "config.toml").read_text()
        (run / "config.toml").write_text(text.replace(small_run["data"]["path"], "gone"))
        shutil.rmtree(run / "checkpoints" / "tokenizer")
    code, lines, _ = command(capsys, "export", run / "checkpoints", tmp_path / "hf")
    assert code == 0 and len(lines) == (1 if has_data else 2)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.config.vocab_size == 300 and loaded.config.eos_token_id == 0
    for name, value in loaded.named_parameters():
        assert torch.equal(value, results[0][name])
    assert (tmp_path / "hf" / "tokenizer.json").is_file() == has_data


def train(rank, config):
    trainer = nl.Trainer(config)
    trainer.fit()
    return parity.whole(trainer.model, torch.Tensor.detach)


def test_help_has_examples(capsys):
    for action in ("inspect", "verify", "diff", "export"):
        with pytest.raises(SystemExit):
            cli.main(["checkpoint", action, "--help"])
        assert f"nearlinear checkpoint {action}" in capsys.readouterr().out.split("examples:")[1]
