"""A new user's path: ``nearlinear new`` and the commands that it prints."""

import io
import json
import shlex

import pytest
import transformers

from nearlinear import cli
from nearlinear.config import train as train_config
from nearlinear.errors import ConfigError
from tests.support.chats import conversation, write_conversations, write_tokenizer

SENTENCES = [f"The rank {n} gathers the shards of block {n % 7}." for n in range(400)]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Work folder with a folder of text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for part in range(2):
        (texts / f"{part}.txt").write_text("\n\n".join(SENTENCES[part::2]))
    return tmp_path


def commands(capsys, *arguments) -> list[list[str]]:
    """Run ``nearlinear new`` and return the commands that it prints."""
    capsys.readouterr()
    assert cli.main(["new", *arguments]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    return [shlex.split(line) for line in lines]


def run_all(found: list[list[str]], *settings: str) -> None:
    """Run commands in this process, with ``settings`` for the training."""
    for program, *arguments in found:
        assert program == "nearlinear"
        changes = [word for setting in settings for word in ("--set", setting)]
        assert cli.main([*arguments, *(changes if arguments[0] == "train" else [])]) == 0


def small_base(folder, template=""):
    """Write a small Hugging Face model with its tokenizer."""
    write_tokenizer(folder, template)
    shape = transformers.LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256, eos_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return folder


def test_from_a_text_folder_to_generate_of_transformers(home, capsys, monkeypatch):
    """Five commands with the installation, and no config written by hand."""
    found = commands(capsys, "my-run", "--data", "texts", "--model", "gpt2-tiny", "--steps", "4")
    assert [each[1] for each in found] == ["data", "train", "generate", "export"]
    assert 1 + len(found) <= 5
    monkeypatch.setattr("sys.stdin", io.StringIO("The rank"))
    model = "model.overrides={n_layer=1, n_embd=32, n_head=2}"
    run_all(found, model, "train.sample_tokens=0", "run.memory_report=false")
    assert "The rank" in capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained("my-run/hf")
    words = transformers.AutoTokenizer.from_pretrained("my-run/hf")
    ids = model.generate(**words("The rank", return_tensors="pt"), max_new_tokens=8, min_length=8)
    assert words.decode(ids[0]).startswith("The rank") and len(ids[0]) > 6


@pytest.mark.parametrize("source", ["chat", "preference"])
def test_from_conversations_and_a_model_to_chat(home, capsys, monkeypatch, source):
    small_base(home / "base", "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>"
               "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")  # fmt: skip
    talks = [conversation(number, turns=1) for number in range(150)]
    write_conversations(home / "talks.jsonl", talks)
    if source == "preference":
        wrong = {"role": "assistant", "content": "Maybe 0."}
        rows = ({"chosen": talk, "rejected": [*talk[:-1], wrong]} for talk in talks)
        (home / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = commands(capsys, "my-run", "--data", "talks.jsonl", "--model", "base", "--steps", "3")
    assert [each[1] for each in found] == ["data", "train", "chat", "export"]
    assert found[0][2] == source and found[0][-2:] == ["--tokenizer", "base"]
    config = train_config.load("my-run/run.toml")
    assert config.data.document_mask and config.data.packing == "best_fit"
    assert config.optimizer.lr == (1e-6 if source == "preference" else 2e-5)
    monkeypatch.setattr("sys.stdin", io.StringIO("Which number follows 3?\n"))
    run_all(found, "train.sample_tokens=0", "run.memory_report=false")
    words = transformers.AutoTokenizer.from_pretrained("my-run/hf")
    ends = transformers.GenerationConfig.from_pretrained("my-run/hf").eos_token_id
    assert words.chat_template and words.convert_ids_to_tokens(ends) == ["<|endoftext|>", "<|end|>"]


def test_chat_without_a_template_is_refused(home, capsys):
    small_base(home / "base")
    assert cli.main(["chat", "base"]) == 2
    assert "has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "command"),
    [
        ({"a.txt": "text"}, "nearlinear data text raw --out raw-tokens"),
        ({"a.jsonl": '{"text": "x"}\n'}, "nearlinear data jsonl raw --out raw-tokens"),
        ({"a.jsonl": json.dumps({"messages": []})}, "nearlinear data chat raw --out raw-tokens"),
        ({"a.parquet": "PAR1"}, "nearlinear data parquet raw --out raw-tokens"),
    ],
)
def test_raw_text_as_data_path_names_the_command(home, capsys, lines, command):
    (home / "raw").mkdir()
    for name, text in lines.items():
        (home / "raw" / name).write_text(text)
    assert cli.main(["train", "--set", "data.path=raw"]) == 2
    said = capsys.readouterr().err
    assert command in said and "set data.path to raw-tokens" in said


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "gpt2-tinny"], "did you mean 'gpt2-tiny'"),
        (["--data", "nowhere"], "no such file or folder"),
        (["--data", "empty"], "holds no text"),
        (["--machines", "0"], "must be at least 1"),
        (["--model", "empty"], "holds no model"),
        (["--steps", "0"], "train.steps"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(home, capsys, arguments, reason):
    (home / "empty").mkdir()
    assert cli.main(["new", "my-run", *arguments]) == 2
    said = capsys.readouterr().err
    assert reason in said and len(said.splitlines()) == 1
    assert not (home / "my-run").exists()


def test_existing_config_is_kept(home, capsys):
    commands(capsys, "my-run", "--data", "texts")
    assert cli.main(["new", "my-run", "--data", "texts"]) == 2
    assert "pass --overwrite" in capsys.readouterr().err
    commands(capsys, "my-run", "--data", "texts", "--overwrite")


def test_machines_ranks_and_hub_names(home, capsys):
    found = commands(
        capsys, "my-run", "--data", "allenai/c4", "--model", "org/model", "--machines", "2",
        "--ranks", "8", "--lora", "4",
    )  # fmt: skip
    assert found[0][1:4] == ["data", "hf", "allenai/c4"]
    assert found[1][:3] == ["torchrun", "--nnodes=2", "--nproc-per-node=8"]
    config = train_config.load("my-run/run.toml")
    assert config.model.init_from == "org/model" and config.lora.rank == 4
    assert config.run.nproc == 8 and config.run.folder == "my-run"


def test_terminal_is_asked_for_missing_values(home, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal("texts\n\n1\n2\n"))
    commands(capsys, "my-run", "--steps", "10")
    config = train_config.load("my-run/run.toml")
    assert config.model.preset == "gpt2-tiny" and config.run.nproc == 2
    monkeypatch.setattr("sys.stdin", Terminal("texts\ngpt2-tiny\ntwo\n"))
    assert cli.main(["new", "other"]) == 2
    assert "--machines: 'two' is not a whole number" in capsys.readouterr().err


def test_model_by_name_comes_from_the_cache_of_the_hub(home, monkeypatch):
    """The layout is that of huggingface_hub, which is offline in tests."""
    from huggingface_hub import constants

    cache = home / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    config = train_config.load({"model": {"init_from": "org/model"}})
    assert not config.model.is_readable
    with pytest.raises(ConfigError, match="cannot be downloaded from the Hugging Face Hub"):
        config.model.architecture  # noqa: B018
    commit = "a" * 40
    folder = cache / "models--org--model"
    small_base(folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    assert config.model.is_readable and config.model.family == "llama"
    assert config.model.longest_sequence == 256
