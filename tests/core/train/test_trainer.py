"""The trainer: it learns, is reproducible bit for bit, resumes its data, and counts correctly."""

import functools
import json
import math

import pytest

import data_prep
import nearlinear as nl
from nearlinear.config import train as train_config
from nearlinear.distributed.mesh import Mesh
from nearlinear.train import preflight
from nearlinear.train.evaluate import held_out_loss


def fit(rank, data, settings=()):
    return nl.Trainer(train_config.load(data, settings, environment={})).fit()


def run(data, ranks=4, settings=()):
    """Train on ``ranks`` ranks and return their results and the rows of metrics.jsonl."""
    results = nl.spmd.run(fit, ranks, args=(data, settings))
    with open(f"{data['run']['folder']}/metrics.jsonl") as file:
        return results, [json.loads(row) for row in file]


def losses(rows):
    return [row["loss"] for row in rows]


def test_training_reduces_the_loss_on_every_rank(small_run):
    results, rows = run(small_run, settings=["train.steps=30", "parallel.hybrid_shard_degree=2"])
    assert rows[0]["loss"] == pytest.approx(math.log(300), abs=0.3)
    assert rows[-1]["eval_loss"] < rows[0]["loss"] - 1.0
    assert len(set(results)) == 1
    assert results[0].steps == 30 and results[0].loss == rows[-1]["loss"]
    assert results[0].sample.startswith("The")


def test_same_seed_gives_bitwise_equal_losses(small_run):
    settings = ["parallel.hybrid_shard_degree=2"]
    first = losses(run(small_run, settings=settings)[1])
    second = losses(run(small_run, settings=settings)[1])
    assert len(first) == 6 and first == second
    other = losses(run(small_run, settings=[*settings, "parallel.random_seed=1"])[1])
    assert other != first


def test_data_parallel_layout_does_not_change_the_losses(small_run):
    wide = dict(small_run, batch={"micro_batch_size": 2, "accumulation": 4})
    alone = losses(run(wide | {"batch": {"micro_batch_size": 8, "accumulation": 1}}, ranks=1)[1])
    for ranks, accumulation, degree in [(2, 2, 1), (4, 1, 2), (4, 1, 4)]:
        batch = {"micro_batch_size": 2, "accumulation": accumulation}
        settings = [f"parallel.hybrid_shard_degree={degree}"]
        found = losses(run(wide | {"batch": batch}, ranks, settings)[1])
        assert found == pytest.approx(alone, abs=1e-5)


LAYOUTS = {
    "tensor 4": (4, {"tensor_parallel_degree": 4}),
    "tensor 2 x shard 2 x replicate 2": (
        8,
        {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2},
    ),
    "context 2 x replicate 2": (4, {"context_parallel_degree": 2, "hybrid_shard_degree": 2}),
    "context 2, gathered": (2, {"context_parallel_degree": 2, "cp_comm_type": "all_gather"}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2, "microbatches": 4}),
    "pipeline 2 x tensor 2 x shard 2": (
        8,
        {
            "pipeline_parallel_degree": 2,
            "tensor_parallel_degree": 2,
            "hybrid_shard_degree": 2,
            "microbatches": 2,
        },
    ),
    "expert 2 x shard 2": (4, {"expert_parallel_degree": 2, "hybrid_shard_degree": 4}),
    "pipeline 2 x tensor 2 x expert 2": (
        8,
        {
            "pipeline_parallel_degree": 2,
            "tensor_parallel_degree": 2,
            "expert_parallel_degree": 2,
            "microbatches": 2,
        },
    ),
}
MIXTURE = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
MIXTURE |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def alone(token_folder, tmp_path_factory):
    """Return a function that trains a preset on one rank, once per preset."""

    @functools.cache
    def of(preset):
        return run(layout_run(token_folder, tmp_path_factory.mktemp(preset), preset, 1), ranks=1)

    return of


def layout_run(tokens, folder, preset, ranks, degrees=None):
    """Return a config with eight sequences per step, divided among ``ranks`` data ranks."""
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 4} if preset == "gpt2-tiny" else MIXTURE
    return {
        "model": {"preset": preset, "overrides": shape},
        "data": {"path": str(tokens), "sequence_length": 32},
        "batch": {"micro_batch_size": 8 // ranks},
        "optimizer": {"lr": 5e-3, "warmup_steps": 2},
        "train": {"steps": 4, "eval_every": 2, "eval_sequences": 16, "sample_tokens": 4},
        "checkpoint": {"folder": ""},
        "run": {"folder": str(folder / "run"), "tensorboard": False, "peak_tflops": 1.0},
        "parallel": degrees or {},
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_model_parallel_layouts_do_not_change_the_losses(layout, alone, token_folder, tmp_path):
    ranks, degrees = LAYOUTS[layout]
    preset = "mixtral-tiny" if "expert" in layout else "gpt2-tiny"
    data_ranks = Mesh.from_config(nl.ParallelConfig(**degrees), ranks).data_ranks
    data = layout_run(token_folder, tmp_path, preset, data_ranks, degrees)
    results, rows = run(data, ranks)
    expected_results, expected = alone(preset)
    assert losses(rows) == pytest.approx(losses(expected), abs=1e-5)
    for key in ("grad_norm", "lr", "batch_id"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], abs=1e-5)
    assert len(set(results)) == 1
    assert results[0].eval_loss == pytest.approx(expected_results[0].eval_loss, abs=1e-5)
    assert results[0].sample == expected_results[0].sample


@pytest.mark.parametrize(
    ("ranks", "degrees", "activations"),
    [
        (2, {}, {"checkpoint": "each", "offload": True}),
        (1, {"sm_activation_offloading": False}, {"offload": True}),
        (2, {"pipeline_parallel_degree": 2, "microbatches": 2}, {"checkpoint": "contiguous"}),
    ],
)
def test_activation_checkpointing_and_offload_do_not_change_the_losses(
    ranks, degrees, activations, alone, token_folder, tmp_path
):
    data_ranks = Mesh.from_config(nl.ParallelConfig(**degrees), ranks).data_ranks
    data = layout_run(token_folder, tmp_path, "gpt2-tiny", data_ranks, degrees)
    _, rows = run(data | {"activations": activations}, ranks)
    assert losses(rows) == pytest.approx(losses(alone("gpt2-tiny")[1]), abs=1e-5)


@pytest.mark.parametrize("ranks", [4, 2])
def test_resumed_data_continues_with_unseen_batches(small_run, ranks):
    whole = run(small_run, settings=["train.steps=8"])[1]
    stopped = run(small_run, settings=["train.steps=8", "train.stop_after=4"])[1]
    assert [r["batch_id"] for r in stopped] == [r["batch_id"] for r in whole[:4]]
    state = f"{small_run['run']['folder']}/data_state.json"
    accumulation = 2 * 4 // ranks  # the same number of samples per step
    settings = ["train.steps=8", f"data.resume={state}", f"batch.accumulation={accumulation}"]
    rows = run(small_run, ranks, settings)[1]
    assert [r["step"] for r in rows] == list(range(1, 9))
    assert [r["batch_id"] for r in rows[4:]] == [r["batch_id"] for r in whole[4:]]
    assert [r["lr"] for r in rows[4:]] == [r["lr"] for r in whole[4:]]
    assert len({r["batch_id"] for r in whole}) == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such file"),
        ("{", "not a data_state.json"),
        ('{"step": 1}', "not a data_state.json"),
        ('{"step": 1, "loader": {"format": 1, "seed": 5}}', "cannot resume the data order"),
    ],
)
def test_invalid_data_state_is_an_error(small_run, tmp_path, text, words):
    path = tmp_path / "state.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(nl.spmd.RankError, match=words) as caught:
        run(small_run, 1, [f"data.resume={path}"])
    assert isinstance(caught.value.__cause__, nl.errors.DataError)


def test_throughput_and_mfu_are_consistent(small_run):
    _, rows = run(small_run, settings=["run.peak_tflops=2"])
    for row in rows:
        assert row["mfu"] == pytest.approx(row["tflops_per_gpu"] / 2)
        assert row["tokens_per_s"] > 0 and row["mem_gib"] > 0


def test_held_out_loss_does_not_depend_on_the_ranks(small_run):
    def evaluate(rank):
        trainer = nl.Trainer(train_config.load(small_run, environment={}))
        whole = len(trainer.held_out)
        trainer.reporter.close()
        return held_out_loss(trainer.model, trainer.held_out, trainer.mesh, 3, whole)

    values = [nl.spmd.run(evaluate, ranks)[0] for ranks in (1, 2, 4)]
    assert values == pytest.approx([values[0]] * 3, abs=1e-5)


@pytest.mark.parametrize(
    ("val_fraction", "mixture", "reason"),
    [(0, False, "is empty"), (0.01, False, "fewer than one window"), (0, True, "no folder of")],
)
def test_run_without_validation_data_trains_with_one_warning(
    small_run, token_folder, tmp_path, caplog, val_fraction, mixture, reason
):
    texts = [f"{'word ' * 20}{number}" for number in range(20)]
    data_prep.prepare(
        data_prep.Source(name="tiny", documents=lambda: iter(texts)),
        tmp_path / "tokens",
        tokenizer=str(token_folder / "tokenizer" / "tokenizer.json"),
        val_fraction=val_fraction,
        progress=False,
    )
    path = str(tmp_path / "tokens")
    data = {"sources": {path: 1.0}} if mixture else {"path": path}
    small_run["data"] = {"sequence_length": 128} | data
    small_run["train"]["steps"] = 2
    preflight.check_run(train_config.load(small_run, environment={}), 2)
    with caplog.at_level("WARNING", logger="nearlinear"):
        results, _ = run(small_run, ranks=2)
    assert math.isnan(results[0].eval_loss)
    warned = [text for text in caplog.messages if "training without validation" in text]
    assert len(warned) == 1 and reason in warned[0]


def test_llama_reduces_the_loss(small_run):
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    data = small_run | {"model": {"preset": "llama-tiny", "overrides": small}}
    _, rows = run(data, 2, ["train.steps=12"])
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3


def test_bf16_and_one_hop_reach_nearly_the_same_loss(small_run):
    plain = losses(run(small_run, settings=["parallel.hybrid_shard_degree=2"])[1])
    one_hop = ["parallel.hybrid_shard_degree=2", "train.two_hop=false"]
    assert losses(run(small_run, settings=one_hop)[1]) == pytest.approx(plain, abs=1e-5)
    bf16 = ["parallel.hybrid_shard_degree=2", "parallel.bf16=true"]
    assert losses(run(small_run, settings=bf16)[1]) == pytest.approx(plain, abs=0.05)


@pytest.mark.gpu
def test_training_on_a_gpu(small_run):
    nl.spmd.run(fit, 1, args=(small_run, ["parallel.bf16=true"]), processes=True)


@pytest.mark.parametrize(
    ("activations", "warned"), [({}, True), ({"offload": True}, False), ({"offload": False}, False)]
)
@pytest.mark.parametrize("key", ["sm_activation_offloading", "offload_activations"])
def test_smp_offloading_key_alone_is_a_warning(key, activations, warned, caplog):
    train_config.load({"parallel": {key: True}, "activations": activations}, environment={})
    assert ("set activations.offload = true" in caplog.text) is warned


@pytest.mark.parametrize("offload", [True, False])
def test_loading_horizon_without_offloading_is_a_warning(offload, token_folder, tmp_path, caplog):
    data = layout_run(token_folder, tmp_path, "gpt2-tiny", 1, {"activation_loading_horizon": 3})
    config = train_config.load(data | {"activations": {"offload": offload}}, environment={})
    with caplog.at_level("WARNING", logger="nearlinear"):
        preflight.check_run(config, 1)
    warning = "parallel.activation_loading_horizon = 3 has no effect without activations.offload"
    assert (warning in caplog.text) != offload


@pytest.mark.parametrize(
    "remote", [{}, {"path": "s3://b/a"}, {"path": "", "sources": {"s3://b/a": 1}}]
)
def test_cache_of_local_data_is_a_warning(remote, token_folder, tmp_path, caplog, monkeypatch):
    here = layout_run(token_folder, tmp_path, "gpt2-tiny", 1)
    opened = functools.partial(preflight.open_dataset, train_config.load(here, environment={}))
    monkeypatch.setattr(preflight, "open_dataset", lambda config, split: opened(split))
    here["data"] |= {"cache": str(tmp_path), "cache_gib": 2.0} | remote
    with caplog.at_level("WARNING", logger="nearlinear"):
        preflight.check_run(train_config.load(here, environment={}), 1)
    for words in ("data.cache has no effect", "data.cache_gib = 2 has no effect"):
        assert (words in caplog.text) == (not remote)


def test_unknown_activation_strategy_is_refused_with_the_config():
    with pytest.raises(nl.errors.ConfigError, match="'contiguous', 'group_N'"):
        train_config.load({"activations": {"checkpoint": "all"}}, environment={})
