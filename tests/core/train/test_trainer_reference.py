"""Compare every number of `nl.Trainer` with a plain PyTorch training loop on one process."""

import json
import math
import threading
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import nearlinear as nl
from nearlinear.config import train as train_config
from nearlinear.data.dataset import TokenDataset
from nearlinear.train import trainer as trainer_module

STEPS, SEQUENCE, WIDTH, LAYERS = 6, 32, 32, 2
GLOBAL_BATCH = 8
OPTIMIZER = {
    "lr": 2e-2,
    "min_lr_ratio": 0.2,
    "warmup_steps": 3,
    "weight_decay": 0.3,
    "beta1": 0.6,
    "beta2": 0.9,
    "eps": 1e-3,  # far above the clipped gradients, so that updates depend on their scale
    "clip": 0.05,
}


def configured(small_run, micro_batch_size, accumulation, degree):
    data = small_run | {
        "batch": {"micro_batch_size": micro_batch_size, "accumulation": accumulation},
        "optimizer": dict(OPTIMIZER),
        "parallel": {"hybrid_shard_degree": degree},
    }
    data["train"] = small_run["train"] | {"steps": STEPS}
    return data


def whole_values(model):
    with torch.no_grad():
        return {name: p.full_tensor().clone() for name, p in model.named_parameters()}


def train_sharded(rank, data):
    """Return the initial values, the metrics of every step, and the final values."""
    trainer = nl.Trainer(train_config.load(data, environment={}))
    first = whole_values(trainer.model)
    rows = [trainer.step() for _ in range(STEPS)]
    trainer.reporter.close()
    return first, rows, whole_values(trainer.model)


def rate_of(step):
    """Linear warm-up to 0.02 in 3 steps, then half a cosine down to 0.004 at step 6."""
    if step <= 3:
        return 0.02 * step / 3
    return 0.004 + 0.016 * (1 + math.cos(math.pi * (step - 3) / 3)) / 2


def train_alone(folder, first):
    """Return losses, gradient norms and final values of plain PyTorch with one batch per step."""
    dataset = TokenDataset(folder, "train", sequence_length=SEQUENCE)
    loader = nl.data.Loader(dataset, GLOBAL_BATCH, 1, data_rank=0, data_ranks=1, seed=0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=dataset.manifest.vocab_size,
            n_positions=256,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    parameters = dict(model.named_parameters())
    assert parameters.keys() == first.keys()
    with torch.no_grad():
        for name, value in first.items():
            parameters[name].copy_(value)
    matrices = [p for p in parameters.values() if p.dim() >= 2]
    vectors = [p for p in parameters.values() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        lr=123.0,
        betas=(0.6, 0.9),
        eps=1e-3,
    )
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        (batch,) = next(loader)
        logits = model(input_ids=batch["input_ids"]).logits
        targets = batch["input_ids"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in parameters.items()}


@pytest.mark.parametrize(
    ("ranks", "degree", "micro_batch_size", "accumulation"),
    [(2, 1, 2, 2), (2, 2, 4, 1), (4, 2, 1, 2)],
)
def test_training_equals_a_plain_pytorch_loop(
    small_run, token_folder, ranks, degree, micro_batch_size, accumulation
):
    data = configured(small_run, micro_batch_size, accumulation, degree)
    results = nl.spmd.run(train_sharded, ranks, args=(data,))
    losses, norms, last = train_alone(token_folder, results[0][0])
    assert min(norms) > 2 * OPTIMIZER["clip"], "the test needs a clip that binds"
    for _, rows, found in results:
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5)
        assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-5)
        assert [row["lr"] for row in rows] == pytest.approx(
            [rate_of(step) for step in range(1, STEPS + 1)], rel=1e-12
        )
        for name, value in last.items():
            assert (found[name] - value).abs().max().item() < 1e-5, name
    moved = max((last[name] - results[0][0][name]).abs().max().item() for name in last)
    assert moved > 1e-3, "the test needs parameters that move"


def test_throughput_and_tflops_follow_their_formulas(small_run, monkeypatch):
    """The clock advances 2.5 s between two readings of a rank."""
    readings = threading.local()

    def perf_counter():
        readings.now = getattr(readings, "now", 0.0) + 2.5
        return readings.now

    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=perf_counter))

    def one_step(rank):
        trainer = nl.Trainer(train_config.load(data, environment={}))
        rows = [trainer.step() for _ in range(2)]
        trainer.reporter.close()
        return rows, trainer.dataset.manifest.vocab_size

    data = configured(small_run, 1, 3, 2) | {
        "run": small_run["run"] | {"peak_tflops": 1e-3},
    }
    for rows, vocabulary in nl.spmd.run(one_step, 4):
        tokens = 1 * 3 * 4 * SEQUENCE  # micro-batch, accumulation, data ranks
        matrices = 12 * LAYERS * WIDTH**2 + vocabulary * WIDTH
        flops = 6 * matrices + 12 * LAYERS * WIDTH * SEQUENCE
        for row in rows:
            assert row["tokens_per_s"] == pytest.approx(tokens / 2.5)
            assert row["tflops_per_gpu"] == pytest.approx(tokens / 2.5 * flops / 4 / 1e12)
            assert row["mfu"] == pytest.approx(row["tflops_per_gpu"] / 1e-3)


@pytest.mark.parametrize(
    ("eval_every", "evaluated"), [(2, [2, 4, 5]), (3, [3, 5]), (5, [5]), (0, [5])]
)
def test_evaluation_follows_eval_every(small_run, eval_every, evaluated):
    data = small_run | {"run": small_run["run"] | {"peak_tflops": 1.0}}
    data["train"] = small_run["train"] | {
        "steps": 5,
        "eval_every": eval_every,
        "sample_tokens": 0,
    }
    nl.spmd.run(lambda rank: nl.Trainer(train_config.load(data, environment={})).fit(), 2)
    with open(f"{data['run']['folder']}/metrics.jsonl") as file:
        rows = [json.loads(row) for row in file]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows if "eval_loss" in row] == evaluated
