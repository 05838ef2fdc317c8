"""Masked language models, encoder-decoders and filling in, against plain PyTorch."""

import functools
import json
import types

import numpy as np
import pytest
import torch

import nearlinear as nl
from nearlinear.config import train as train_config
from nearlinear.data.dataset import TokenDataset
from nearlinear.data.masking import IGNORED_LABEL, Masks, make_batch
from nearlinear.errors import ConfigError, RankError
from nearlinear.train import objectives
from nearlinear.train.model import build_model
from nearlinear.train.objectives import FillInTheMiddle, SpanCorruption, build_objective

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
    return dataset, batch, objective, objective(batch, windows.tolist(), windows.tolist())


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


EOS, PREFIX, MIDDLE, SUFFIX = 0, 1000, 1001, 1002


def parts_of(document: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Return the tokens between prefix and suffix token, between suffix and middle token, after."""
    suffix, middle = document.index(SUFFIX), document.index(MIDDLE)
    assert document[0] == PREFIX and suffix < middle
    return document[1:suffix], document[suffix + 1 : middle], document[middle + 1 :]


def documents_of(rows: torch.Tensor) -> list[list[int]]:
    """Return the documents in all rows, without EOS; a row's end ends a document, too."""
    found = [[]]
    for row in rows.tolist():
        for token in row:
            found[-1].append(token) if token != EOS else found.append([])
        found.append([])
    return found


@pytest.mark.parametrize("spm_rate", [0.0, 0.3, 1.0])
def test_rearranged_documents_contain_all_tokens_but_three(spm_rate):
    generator = np.random.default_rng(0)
    ids = torch.from_numpy(generator.integers(1, 1000, (200, 128)))
    ids[torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.03] = EOS
    batch = {"input_ids": ids, "labels": ids.clone()}
    fill_in = FillInTheMiddle([PREFIX, MIDDLE, SUFFIX], 0.5, spm_rate, EOS, 1000)
    found = fill_in(batch, list(range(200)), list(range(200)))
    assert torch.equal(found["labels"], found["input_ids"])
    assert torch.equal(found["input_ids"] == EOS, ids == EOS)
    changed, begin_with_suffix, shares = 0, 0, []
    before, after = documents_of(ids), documents_of(found["input_ids"])
    long = [pair for pair in zip(before, after, strict=True) if len(pair[0]) > 20]
    for one, other in zip(before, after, strict=True):
        if PREFIX not in other:
            assert one == other
            continue
        prefix, suffix, rest = parts_of(other)
        assert prefix + rest + suffix == one[:-3]
    for one, other in long:
        if PREFIX in other:
            prefix, suffix, rest = parts_of(other)
            changed += 1
            begin_with_suffix += not prefix
            shares.append(len(suffix) / (len(one) - 3))
    assert len(long) > 300 and 0.4 < changed / len(long) < 0.6
    assert abs(begin_with_suffix / changed - spm_rate) < 0.1
    assert 0.28 < np.mean(shares) < 0.39  # a third each
    short = [pair for pair in zip(before, after, strict=True) if len(pair[0]) < 4]
    assert short and all(one == other for one, other in short)


def test_rearranged_documents_keep_excluded_targets_in_their_places(small_run):
    small_run["data"] |= {"packing": "best_fit", "document_mask": True, "mask_eos": True}
    config = train_config.load(small_run, environment={})
    dataset = dataset_of(config)
    batch = make_batch(dataset, np.arange(24), Masks(documents=True, eos=True))
    eos = dataset.manifest.eos_id
    fill_in = FillInTheMiddle([PREFIX, MIDDLE, SUFFIX], 1.0, 0.0, eos, 1000)
    found = fill_in(batch, list(range(24)), list(range(24)))
    assert torch.equal(found["position_ids"], batch["position_ids"])
    excluded = batch["labels"] == IGNORED_LABEL
    assert torch.equal(found["labels"] == IGNORED_LABEL, excluded) and excluded.any()
    assert torch.equal(found["labels"][~excluded], found["input_ids"][~excluded])
    starts = torch.nonzero(found["input_ids"] == PREFIX)
    assert len(starts) > 10 and all(batch["position_ids"][row, at] == 0 for row, at in starts)


def fim_names(small_run) -> list[str]:
    """Return three names in the vocabulary of the small run's tokenizer."""
    config = train_config.load(small_run, environment={})
    vocabulary = json.loads(dataset_of(config).tokenizer().read_text())["model"]["vocab"]
    return sorted(vocabulary)[-3:]


def test_sequences_are_rearranged_alike_on_any_layout(small_run):
    small_run["data"] |= {"fim_rate": 0.7, "fim_tokens": fim_names(small_run)}
    config = train_config.load(small_run, environment={})
    dataset = dataset_of(config)
    objective = build_objective(config, dataset)
    assert objective.identity.startswith("fill in the middle 0.7 0.5 [")
    whole, *parts = (
        nl.data.Loader(dataset, 4 // ranks, 1, seed=3, data_rank=rank, data_ranks=ranks,
                       transform=objective)
        for rank, ranks in ((0, 1), (0, 2), (1, 2))
    )  # fmt: skip
    plain = nl.data.Loader(dataset, 4, 1, seed=3, data_rank=0, data_ranks=1)
    for _ in range(3):
        (expected,), (unchanged,) = next(whole), next(plain)
        found = torch.cat([next(part)[0]["input_ids"] for part in parts])
        assert sorted(found.tolist()) == sorted(expected["input_ids"].tolist())
        assert not torch.equal(expected["input_ids"], unchanged["input_ids"])


def test_held_out_loss_is_that_of_unchanged_text(small_run):
    def losses(rank, **data):
        changed = small_run | {"data": small_run["data"] | data}
        trainer = nl.Trainer(train_config.load(changed, environment={}))
        found = trainer.evaluate(), trainer.step()["loss"]
        trainer.reporter.close()
        return found

    names = fim_names(small_run)
    (plain,) = nl.spmd.run(losses, 1)
    (filled,) = nl.spmd.run(functools.partial(losses, fim_rate=1.0, fim_tokens=names), 1)
    assert plain[0] == filled[0] and plain[1] != filled[1]


def test_tokens_of_known_tokenizers_are_found(small_run, monkeypatch):
    small_run["data"] |= {"fim_rate": 0.5}
    config = train_config.load(small_run, environment={})
    dataset = dataset_of(config)
    with pytest.raises(ConfigError, match="lacks the tokens <fim_prefix>, .*Add three such tokens"):
        build_objective(config, dataset)
    for number, names in enumerate(objectives.FIM_TOKENS):
        known = {name: 500 + 10 * number + i for i, name in enumerate(names)}
        tokenizer = types.SimpleNamespace(get_vocab=lambda known=known: known)
        monkeypatch.setattr(objectives, "_read_tokenizer", lambda file, found=tokenizer: found)
        found = build_objective(config, dataset)
        assert [found.prefix, found.middle, found.suffix] == [[known[name]] for name in names]
        assert found.vocabulary == 500 + 10 * number + 3


def test_unsuitable_settings_for_filling_in_are_refused(small_run):
    data = configured(small_run, "bert-tiny")
    data["data"] = data["data"] | {"fim_rate": 0.5}
    config = train_config.load(data, environment={})
    with pytest.raises(ConfigError, match="fim_rate = 0.5: models of model.objective = 'masked'"):
        build_objective(config, dataset_of(config))
    small_run["data"] |= {"fim_rate": 0.5}
    config = train_config.load(small_run, environment={})
    dataset = dataset_of(config)
    dataset.marks_targets = True
    with pytest.raises(ConfigError, match="fim_rate = 0.5: the data contain conversations"):
        build_objective(config, dataset)
    for tokens in (["<a>", "<b>"], ["<a>", "<a>", "<b>"]):
        with pytest.raises(ConfigError, match="fim_tokens = .* give three names"):
            train_config.load({"data": {"fim_tokens": tokens}}, environment={})
    with pytest.raises(ConfigError, match=r"fim_rate"):
        train_config.load({"data": {"fim_rate": 1.5}}, environment={})


def test_planner_refuses_models_without_causal_attention():
    with pytest.raises(ConfigError, match="the planner models decoders only"):
        nl.plan({"model": {"preset": "bert-base"}}, "p4d.24xlarge:1")
