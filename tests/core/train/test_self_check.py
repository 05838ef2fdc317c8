"""The self-check catches planted faults, passes correct layouts, and remembers its results."""

import functools
import json
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import nearlinear as nl
from nearlinear import cli
from nearlinear.config import train as train_config
from nearlinear.config.train import TrainConfig
from nearlinear.distributed import runtime
from nearlinear.errors import ConfigError, RankError
from nearlinear.fsdp.model_state import local_tensor, model_state
from nearlinear.train.self_check import check, compare, probe, twin
from tests.support import parity

SHARD, TENSOR = {}, {"tensor_parallel_degree": 2}
CONTEXT, EXPERT = {"context_parallel_degree": 2}, {"expert_parallel_degree": 2}
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}


def full_config(family: str, **changes):
    """Return a config of ``family`` in the size of a real model."""
    name, _ = parity.FAMILIES[family]
    tied = {"tie_word_embeddings": True} if family == "llama_tied" else {}
    return getattr(transformers, name)(**tied | changes)


def differences(rank, family, parallel, kinds=("plain",), **changes):
    """Return the differences between the layout and one process."""
    full = full_config(family, **changes)
    config = TrainConfig(parallel=nl.ParallelConfig(**parallel))
    nl.init(config.parallel)
    kind: Any = transformers.AutoModelForCausalLM._model_mapping[type(full)]
    small = twin.twin_config(full, compare.twin_size(config))
    return compare.compare(kind, small, config, kinds)


TESTED = [
    ("gpt2", 4, TENSOR | CONTEXT),
    ("gpt_neox", 4, TENSOR | PIPELINE),
    ("llama", 4, CONTEXT | PIPELINE),
    ("llama_tied", 4, TENSOR | {"hybrid_shard_degree": 1}),
    ("mistral", 4, TENSOR | CONTEXT),
    ("mixtral", 4, TENSOR | EXPERT),
]


def test_only_tested_families_skip_the_check():
    assert {full_config(family).model_type for family, *_ in TESTED} == check.TESTED_FAMILIES


@pytest.mark.parametrize(
    ("family", "ranks", "parallel"),
    TESTED,
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_tested_families_equal_one_process(family, ranks, parallel):
    kinds = ("left", "packed")
    found = nl.spmd.run(differences, ranks, args=(family, parallel, kinds))
    assert found == [dict.fromkeys(kinds)] * ranks


# planted faults: each changes the model before or after it is divided


def layers(model: nn.Module, ending: str) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith(ending)]


def on_output(model: nn.Module, ending: str, change) -> None:
    """Change the output of the first module whose name ends in ``ending``."""
    layers(model, ending)[0].register_forward_hook(lambda m, args, output: change(m, output))


def on_first_input(model: nn.Module, ending: str, change) -> None:
    for module in layers(model, ending):
        module.register_forward_pre_hook(lambda m, args: (change(args[0]), *args[1:]))


def wrong_mask(model):
    for module in layers(model, "self_attn"):
        module.sliding_window = None
    model.config.sliding_window = None


def without_norm_reduction(model):
    model_state(model).partial_gradients.clear()


def unshifted_labels(model):
    def loss(logits, labels, vocab_size, **unused):
        return nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))

    model.loss_function = loss


def dropped_bias(model):
    on_output(model, "query_key_value", lambda module, output: output - module.bias)


def wrong_rotary_offset(model):
    rank = runtime.current().rank

    def shift(module, args, kwargs):
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        return (args[0], positions + rank), {}

    layers(model, "rotary_emb")[0].register_forward_pre_hook(shift, with_kwargs=True)


@torch.no_grad()
def swapped_experts(model):
    weights = next(p for name, p in model.named_parameters() if name.endswith("gate_up_proj"))
    local = local_tensor(weights)
    local.copy_(local.flip(0))


def missing_router_loss(model):
    model.router_aux_loss_coef = 0.0


def wrong_gradient_scale(model):
    on_output(model, "mlp.down_proj", lambda m, output: output / 2 + output.detach() / 2)


def untied_head(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def wrong_head_order(model):
    width = 3 * twin.HEAD_WIDTH
    on_output(model, "query_key_value", lambda m, output: output.roll(width, -1))


def active_dropout(model):
    layers(model, "h.0.mlp.dropout")[0].p = 0.1


def wrong_positions(model):
    on_first_input(model, "wpe", lambda positions: positions + 1)


def frozen_norm(model):
    layers(model, "post_attention_layernorm")[0].weight.requires_grad_(False)


def wrong_stage_output(model):
    if runtime.current().rank == 1:
        on_output(model, "mlp.up_proj", lambda m, output: output * 1.01)


BEFORE = {untied_head, frozen_norm}
"""Faults planted before the model is divided."""

FAULTS = [
    (wrong_mask, "mistral", SHARD, {}, "loss", ""),
    (without_norm_reduction, "llama", TENSOR, {}, "gradient", "norm.weight"),
    (unshifted_labels, "llama", SHARD, {}, "loss", ""),
    (dropped_bias, "gpt_neox", SHARD, {}, "loss", "query_key_value.bias"),
    (wrong_rotary_offset, "llama", CONTEXT, {}, "loss", "self_attn"),
    (swapped_experts, "mixtral", EXPERT, {}, "initial values", "gate_up_proj"),
    (missing_router_loss, "mixtral", SHARD, {"output_router_logits": True}, "loss", ""),
    (wrong_gradient_scale, "llama", SHARD, {}, "gradient", "layers.0"),
    (untied_head, "llama_tied", SHARD, {}, "initial values", "lm_head.weight"),
    (wrong_head_order, "gpt_neox", TENSOR, {}, "loss", "layers.0"),
    (active_dropout, "gpt2", SHARD, {}, "loss", ""),
    (wrong_positions, "gpt2", SHARD, {}, "loss", ""),
    (frozen_norm, "llama", SHARD, {}, "gradient", "layers.0.post_attention_layernorm"),
    (wrong_stage_output, "llama", PIPELINE, {}, "loss", ""),
]


@pytest.mark.parametrize(
    ("fault", "family", "parallel", "changes", "quantity", "tensor"),
    FAULTS,
    ids=[case[0].__name__ for case in FAULTS],
)
def test_planted_faults_are_found(fault, family, parallel, changes, quantity, tensor, monkeypatch):
    divide = compare.parallelize

    def faulty(model, config):
        if fault in BEFORE:
            fault(model)
        model, blocks = divide(model, config)
        if fault not in BEFORE:
            fault(model)
        return model, blocks

    monkeypatch.setattr(compare, "parallelize", faulty)
    work = functools.partial(differences, **changes)
    first, second = nl.spmd.run(work, 2, args=(family, parallel))
    found = first["plain"]
    assert first == second and found.quantity == quantity and tensor in found.tensor, found
    assert f"the {quantity} " in str(found) and found.error > 1e-4


def double_norm(clip, model, norm):
    return clip(model, 2 * norm)


def equal_weights(accumulate, model, micro_batches):
    return accumulate(model, micro_batches, weight=lambda batch: 1.0)


@pytest.mark.parametrize(
    ("name", "fault", "quantity"),
    [
        ("clip_grad_norm_", double_norm, "gradient norm"),
        ("accumulate", equal_weights, "gradient"),
    ],
)
def test_wrong_clipping_and_weights_are_found(name, fault, quantity, monkeypatch):
    monkeypatch.setattr(compare, name, functools.partial(fault, getattr(compare, name)))
    found = nl.spmd.run(differences, 2, args=("llama", SHARD))[0]["plain"]
    assert found.quantity == quantity


def settings(tmp_path, **train) -> TrainConfig:
    loop, data = train_config.LoopConfig(**train), train_config.DataConfig(cache=str(tmp_path))
    return TrainConfig(train=loop, data=data)


def checked(rank, config, family="Qwen2", kind=None):
    """Check a model on the meta device."""
    nl.init(config.parallel)
    with nl.deferred_init(as_without=False):
        full = getattr(transformers, f"{family}Config")(
            num_hidden_layers=3, vocab_size=500, hidden_size=320, intermediate_size=640
        )
        build = kind._from_config if kind else transformers.AutoModelForCausalLM.from_config
        model = build(full)
    check.check_model(model, config)


def counted(monkeypatch) -> list:
    """Count the comparisons of one rank."""
    calls, original = [], check.compare

    def count(*args):
        calls.append(runtime.current().rank)
        return original(*args)

    monkeypatch.setattr(check, "compare", count)
    return calls


def test_results_are_cached_and_depend_on_the_layout(tmp_path, monkeypatch):
    calls = counted(monkeypatch)
    nl.spmd.run(checked, 2, args=(settings(tmp_path),))
    nl.spmd.run(checked, 2, args=(settings(tmp_path),))
    assert sorted(calls) == [0, 1]
    (path,) = (tmp_path / check.FOLDER).iterdir()
    known = json.loads(path.read_text())
    assert known["difference"] == "" and known["model"] == "Qwen2ForCausalLM"
    nl.spmd.run(checked, 1, args=(settings(tmp_path),))
    assert sorted(calls) == [0, 0, 1]
    path.write_text(json.dumps(known | {"difference": "module a, tensor b: the loss differs"}))
    with pytest.raises(RankError, match="module a, tensor b"):
        nl.spmd.run(checked, 2, args=(settings(tmp_path),))


def test_tested_families_are_checked_on_request_only(tmp_path, monkeypatch):
    calls = counted(monkeypatch)
    nl.spmd.run(checked, 1, args=(settings(tmp_path), "Llama"))
    nl.spmd.run(checked, 1, args=(settings(tmp_path, self_check="off"),))
    assert not calls
    nl.spmd.run(checked, 1, args=(settings(tmp_path, self_check="always"), "Llama"))
    assert calls == [0]


def test_a_wrong_layout_is_refused_before_training(tmp_path, monkeypatch):
    divide = compare.parallelize

    def faulty(model, config):
        model, blocks = divide(model, config)
        wrong_gradient_scale(model)
        return model, blocks

    monkeypatch.setattr(compare, "parallelize", faulty)
    with pytest.raises(RankError) as caught:
        nl.spmd.run(checked, 2, args=(settings(tmp_path),))
    assert isinstance(caught.value.__cause__, ConfigError)
    message = str(caught.value.__cause__)
    assert "module model.layers.0." in message and "train.self_check" in message


def test_check_command_reports_each_kind(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "model"
    transformers.Qwen3Config(num_hidden_layers=6).save_pretrained(folder)
    layout = ["check", str(folder / "config.json"), "--layout", "tp=2"]
    assert cli.main(layout) == 0
    assert capsys.readouterr().out.count("equal") == len(probe.KINDS) + 1
    divide = compare.parallelize

    def faulty(model, config):
        model, blocks = divide(model, config)
        without_norm_reduction(model)
        return model, blocks

    monkeypatch.setattr(compare, "parallelize", faulty)
    assert cli.main(layout) == 1
    out = capsys.readouterr().out
    assert "norm, tensor weight: the gradient differs" in out and "4 of 4" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-model"], "neither a preset"),
        (["llama-tiny", "--layout", "tp"], "expected name=value"),
        (["llama-tiny", "--layout", "xp=2"], "xp"),
        (["llama-tiny", "--layout", "tp=2", "--ranks", "3"], "does not divide"),
    ],
)
def test_check_command_refuses_in_one_line(arguments, words, capsys):
    assert cli.main(["check", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


class Unpredictable(transformers.Qwen2ForCausalLM):
    """A model of which one process cannot be compared: its forward pass draws numbers."""

    def forward(self, *args, **kwargs):
        output: Any = super().forward(*args, **kwargs)
        output.loss = output.loss * torch.rand(())
        return output


def test_models_without_a_reference_are_reported(tmp_path, caplog):
    nl.spmd.run(checked, 1, args=(settings(tmp_path), "Qwen2", Unpredictable))
    assert "trained without a self-check" in caplog.text and "random numbers" in caplog.text
    always = settings(tmp_path, self_check="always")
    with pytest.raises(RankError, match="random numbers"):
        nl.spmd.run(checked, 1, args=(always, "Qwen2", Unpredictable))
