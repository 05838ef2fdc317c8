"""Masked language models and encoder-decoders through `nl.Trainer`, against plain PyTorch."""

import numpy as np
import pytest
import torch

import nearlinear as nl
from nearlinear.config import train as train_config
from nearlinear.data.dataset import TokenDataset
from nearlinear.data.masking import IGNORED_LABEL, Masks, make_batch
from nearlinear.errors import ConfigError, RankError
from nearlinear.train.model import build_model
from nearlinear.train.objectives import SpanCorruption, build_objective

SHAPES = {
    "bert-tiny": {"hidden_size": 32, "intermediate_size": 64},
    "t5-tiny": {"d_model": 32, "d_kv": 16, "d_ff": 64},
}
STEPS = 3


def configured(small_run, preset, packing="concat", **tables):
    data = small_run | {
        "model": {"preset": preset, "overrides": SHAPES[preset]},
        "data": small_run["data"] | {"packing": packing},
        "optimizer": {"lr": 5e-3, "warmup_steps": 1, "eps": 1e-5, "weight_decay": 0.0, "clip": 0.5},
        "train": small_run["train"] | {"steps": STEPS, "eval_every": 2},
        "parallel": {"hybrid_shard_degree": 2},
        "batch": {"micro_batch_size": 2, "sequences": 8},
    }
    return data | tables


def dataset_of(config):
    options = {"sequence_length": config.sequence_length, "packing": config.data.packing}
    return TokenDataset(config.data.path, "train", **options)


def values_of(model):
    with torch.no_grad():
        return {name: p.full_tensor().clone() for name, p in model.named_parameters()}


def train(rank, data):
    trainer = nl.Trainer(train_config.load(data, environment={}))
    first, losses = values_of(trainer.model), []
    while trainer.done < trainer.config.train.steps:
        losses.append(trainer.step()["loss"])
        if trainer.checkpoints and trainer.done == 2:
            trainer.checkpoints.save(2)
            trainer.checkpoints.finish()
    evaluated = trainer.evaluate()
    trainer.reporter.close()
    return first, losses, evaluated, values_of(trainer.model)


def train_alone(data, first):
    config = train_config.load(data, environment={})
    dataset = dataset_of(config)
    objective = build_objective(config, dataset)
    loader = nl.data.Loader(dataset, 8, 1, data_rank=0, data_ranks=1, transform=objective)
    built = build_model(config.model, objective.vocabulary)
    model = type(built)(built.config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(first.pop(name))
    assert not first
    optimizer, losses = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=1e-5), []
    for step in range(STEPS):
        (batch,) = next(loader)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        rate = (1.0, 0.55, 0.1)[step] * 5e-3  # a cosine from 1 to 0.1 over two steps
        optimizer.param_groups[0].update(lr=rate, weight_decay=0.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


@pytest.mark.parametrize("packing", ["concat", "one_document"])
@pytest.mark.parametrize("preset", SHAPES)
def test_training_on_two_replicas_of_two_shards_equals_one_process(small_run, preset, packing):
    data = configured(small_run, preset, packing)
    results = nl.spmd.run(train, 4, args=(data,))
    losses, values = train_alone(data, results[0][0])
    for _, found, evaluated, parameters in results:
        assert found == pytest.approx(losses, abs=1e-5)
        assert evaluated == results[0][2] < 10
        for name, value in values.items():
            torch.testing.assert_close(parameters[name], value.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("preset", SHAPES)
def test_resumed_run_draws_the_same_noise(small_run, preset, tmp_path):
    folder = {"checkpoint": {"folder": str(tmp_path / "checkpoints"), "keep": 1}}
    data = configured(small_run, preset, **folder)
    _, losses, _, expected = nl.spmd.run(train, 4, args=(data,))[0]
    data["run"] = data["run"] | {"folder": str(tmp_path / "again")}
    for _, found, _, values in nl.spmd.run(train, 2, args=(data,)):  # on fewer ranks
        assert found == pytest.approx(losses[2:], abs=1e-5)
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, atol=1e-5, rtol=0)
    data["data"] = data["data"] | {"noise_density": 0.3}
    with pytest.raises(RankError, match=r"objective was .* 0\.15.* and is .* 0\.3"):
        nl.spmd.run(train, 2, args=(data,))


def loaded(small_run, preset, packing):
    config = train_config.load(configured(small_run, preset, packing), environment={})
    dataset = dataset_of(config)
    windows = np.arange(24)
    batch = make_batch(dataset, windows, Masks())
    objective = build_objective(config, dataset)
    return dataset, batch, objective, objective(batch, windows.tolist())


@pytest.mark.parametrize("packing", ["concat", "one_document"])
def test_masked_tokens_are_the_targets(small_run, packing):
    dataset, batch, objective, found = loaded(small_run, "bert-tiny", packing)
    chosen, real = found["labels"] != IGNORED_LABEL, batch["labels"] != IGNORED_LABEL
    ids = batch["input_ids"]
    assert torch.equal(found["labels"][chosen], ids[chosen])
    assert torch.equal(found["input_ids"][~chosen], ids[~chosen])
    assert not chosen[~real].any() and not chosen[ids == dataset.manifest.eos_id].any()
    assert 0.1 < chosen[real].float().mean() < 0.2
    masked = found["input_ids"] == objective.vocabulary - 1
    assert 0.7 < masked[chosen].float().mean() < 0.9
    if packing != "concat":
        assert torch.equal(found["attention_mask"].bool(), real)


@pytest.mark.parametrize("packing", ["concat", "one_document"])
def test_inputs_and_targets_of_span_corruption_restore_the_sequence(small_run, packing):
    dataset, batch, objective, found = loaded(small_run, "t5-tiny", packing)
    assert isinstance(objective, SpanCorruption)
    mask = found.get("attention_mask", torch.ones_like(found["input_ids"])).bool()
    for row in range(len(mask)):
        inputs = found["input_ids"][row][mask[row]].tolist()
        targets = found["labels"][row][found["labels"][row] != IGNORED_LABEL].tolist()
        assert inputs.pop() == dataset.manifest.eos_id
        spans = {}
        for token in targets[:-1]:
            if token in objective.sentinels:
                spans[token] = current = []
            else:
                current.append(token)
        restored = [t for token in inputs for t in spans.get(token, [token])]
        original = batch["input_ids"][row][batch["labels"][row] != IGNORED_LABEL].tolist()
        assert restored == original
        assert list(spans) == objective.sentinels[: len(spans)]
        noise = sum(map(len, spans.values()))
        assert not spans or noise == max(1, round(0.15 * len(original)))


@pytest.mark.parametrize("key", ["document_mask", "mask_eos"])
def test_masks_of_causal_models_are_refused(small_run, key):
    data = configured(small_run, "bert-tiny")
    data["data"] = data["data"] | {key: True}
    config = train_config.load(data, environment={})
    dataset = dataset_of(config)
    with pytest.raises(ConfigError, match=f"data.{key} = true: model.objective = 'masked'"):
        build_objective(config, dataset)


def test_planner_refuses_models_without_causal_attention():
    with pytest.raises(ConfigError, match="the planner models decoders only"):
        nl.plan({"model": {"preset": "bert-base"}}, "p4d.24xlarge:1")
