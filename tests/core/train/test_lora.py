"""Low-rank adapters: sharded as in one process, saved, resumed, and exported."""

from pathlib import Path

import pytest
import torch
import transformers

import nearlinear as nl
from nearlinear import cli
from nearlinear.config import train as train_config
from nearlinear.distributed import runtime
from nearlinear.errors import CheckpointError, ConfigError
from nearlinear.train import preflight

peft = pytest.importorskip("peft")

SHAPES = {
    "llama": transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folder with a model of each family."""
    folder = tmp_path_factory.mktemp("bases")
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(shape).save_pretrained(folder / name)
    return folder


@pytest.fixture
def run(small_run, bases):
    small_run["model"] = {"init_from": str(bases / "llama")}
    small_run["lora"] = {"rank": 4, "alpha": 32.0}
    small_run["optimizer"] = {"lr": 1e-2, "warmup_steps": 1}
    small_run["train"] |= {"steps": 4, "eval_sequences": 0, "sample_tokens": 0}
    small_run["run"]["memory_report"] = False
    small_run["batch"] = {"micro_batch_size": 4}
    return small_run


def losses(rank: int, config: dict, steps: int = 4) -> list[float]:
    trainer = nl.Trainer(config)
    assert sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"])
    return [trainer.step()["loss"] for _ in range(steps)]


@pytest.mark.parametrize(("ranks", "degree"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("family", SHAPES)
def test_shards_equal_one_process(run, bases, family, ranks, degree):
    run["model"]["init_from"] = str(bases / family)
    expected = losses(0, run)
    assert expected[-1] < expected[0]
    runtime.shutdown()
    run["batch"] = {"micro_batch_size": 4 // ranks}
    run["parallel"] = {"hybrid_shard_degree": degree}
    for found in nl.spmd.run(losses, ranks=ranks, args=(run,)):
        assert found == pytest.approx(expected, abs=1e-5)


def test_losses_equal_those_of_peft_alone(run, bases):
    """The reference is peft's own model under torch's AdamW."""
    trainer = nl.Trainer(run)
    base = transformers.AutoModelForCausalLM.from_pretrained(bases / "llama")
    settings = peft.LoraConfig(r=4, lora_alpha=32, target_modules="all-linear")
    model = peft.inject_adapter_in_model(settings, base)
    own = {name: p.full_tensor() for name, p in trainer.model.named_parameters()}
    model.load_state_dict(own, strict=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 7
    options = trainer.config.optimizer
    optimizer = torch.optim.AdamW(
        trained, lr=options.lr, betas=(options.beta1, options.beta2), weight_decay=0.1
    )
    batches = trainer.loader
    position = batches.state_dict()
    rates, found = [], []
    for _ in range(3):
        metrics = trainer.step()
        rates.append(metrics["lr"])
        found.append(metrics["loss"])
    batches.load_state_dict(position)
    for rate, loss in zip(rates, found, strict=True):
        (batch,) = next(batches)
        expected = model(**batch).loss
        assert loss == pytest.approx(expected.item(), abs=1e-5)
        optimizer.zero_grad()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(trained, options.clip)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()


def fit(rank: int, config: dict) -> int:
    trainer = nl.Trainer(config)
    trainer.fit()
    return trainer.first_step


@pytest.mark.parametrize("family", SHAPES)
def test_saved_adapters_resume_and_are_exported(run, bases, tmp_path, family, capsys):
    """Save on 2 ranks, resume on one; both exports give the logits of the trained model."""
    run["model"]["init_from"] = str(bases / family)
    run["checkpoint"] = {"folder": "auto"}
    folder = Path(run["run"]["folder"])
    run["batch"] = {"micro_batch_size": 2}
    nl.spmd.run(fit, ranks=2, args=(run | {"train": run["train"] | {"stop_after": 2}},))
    run["batch"] = {"micro_batch_size": 4}
    trainer = nl.Trainer(run)
    assert trainer.first_step == 2
    trainer.fit()
    ids = torch.arange(40)[None]
    trainer.model.eval()
    expected = trainer.model(input_ids=ids).logits.detach()
    runtime.shutdown()
    assert cli.main(["export", str(folder), str(tmp_path / "merged")]) == 0
    assert cli.main(["export", str(folder), str(tmp_path / "adapter"), "--adapter"]) == 0
    before = transformers.AutoModelForCausalLM.from_pretrained(bases / family)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not any("lora" in name for name, _ in merged.named_parameters())
    adapted = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(bases / family), tmp_path / "adapter"
    )
    assert (before(ids).logits - expected).abs().max() > 1e-2
    for model in (merged, adapted):
        torch.testing.assert_close(model.eval()(ids).logits, expected, atol=1e-5, rtol=1e-5)
    for model in (folder, tmp_path / "merged", tmp_path / "adapter"):
        options = ["--prompt", "The model", "--tokens", "4", "--temperature", "0"]
        assert cli.main(["generate", str(model), *options]) == 0
    said = {line for line in capsys.readouterr().out.splitlines() if line.startswith("The model")}
    assert len(said) == 1


def test_adapter_export_without_adapters_is_refused(run, tmp_path, capsys):
    run["lora"] = {"rank": 0}
    run["checkpoint"] = {"folder": "auto"}
    run["train"]["steps"] = 1
    fit(0, run)
    command = ["export", run["run"]["folder"], str(tmp_path / "adapter"), "--adapter"]
    assert cli.main(command) == 2
    assert "has no adapters" in capsys.readouterr().err
    assert not list(tmp_path.glob("*adapter*"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {"preset": "gpt2-tiny"}}, "are random"),
        ({"parallel": {"tensor_parallel_degree": 2}}, "sharded and replicated only"),
        ({"lora": {"alpha": 8.0}}, "the other keys"),
    ],
)
def test_unsupported_combinations_are_refused_before_the_ranks(run, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        preflight.check_run(train_config.load(run | changes), 2)


@pytest.mark.parametrize("target", ["no_such_layer", "embed_tokens", "lm_head"])
def test_targets_must_be_linear_layers_of_blocks(run, target):
    run["lora"]["targets"] = [target]
    with pytest.raises(ConfigError, match="name linear layers of the blocks"):
        nl.Trainer(run)


def test_frozen_matrices_count_four_flops_per_parameter(run):
    trainer = nl.Trainer(run)
    frozen = {"embed_tokens", "lm_head"}
    attention = 12 * 2 * 32 * trainer.config.sequence_length
    expected = attention + 4.0 * 300 * 32  # the output layer
    for name, parameter in trainer.model.named_parameters():
        if parameter.dim() == 2 and not frozen & set(name.split(".")):
            expected += parameter.numel() * (6.0 if "lora" in name else 4.0)
    assert trainer.flops_per_token == expected


def test_live_export_names_the_command(run, tmp_path):
    trainer = nl.Trainer(run)
    with pytest.raises(CheckpointError, match="nearlinear export"):
        nl.export_hf(tmp_path / "hf", trainer.model)
