"""A run saved on 8 ranks resumes in any layout with the same losses and samples."""

import numpy as np
import pytest

import nearlinear as nl

SAVED = (8, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2})  # 2 replicas
LAYOUTS = {
    "1": (1, {}),
    "tensor 4": (4, {"tensor_parallel_degree": 4}),
    "pipeline 2 x shard 2": (
        4,
        {"pipeline_parallel_degree": 2, "hybrid_shard_degree": 2, "microbatches": 2},
    ),
    "context 2 x replicate 2": (4, {"context_parallel_degree": 2, "hybrid_shard_degree": 2}),
    "shard 4 x replicate 2, sliced": (8, {"hybrid_shard_degree": 4, "shard_optimizer_state": True}),
    "pipeline 2 x tensor 2 x replicate 2": (
        8,
        {
            "pipeline_parallel_degree": 2,
            "tensor_parallel_degree": 2,
            "hybrid_shard_degree": 1,
            "microbatches": 2,
        },
    ),
    "expert 2 x tensor 2 x shard 4": (
        8,
        {"expert_parallel_degree": 2, "tensor_parallel_degree": 2, "hybrid_shard_degree": 4},
    ),
}
SHAPES = {
    "gpt2-tiny": {"n_layer": 2, "n_embd": 32, "n_head": 4},
    "llama-tiny": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 4},
    "mixtral-tiny": {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 4}
    | {"num_experts_per_tok": 4},  # rounding would decide between nearly equal experts
}
CASES = [
    *[("gpt2-tiny", layout) for layout in LAYOUTS if "expert" not in layout],
    ("llama-tiny", "pipeline 2 x tensor 2 x replicate 2"),
    ("mixtral-tiny", "expert 2 x tensor 2 x shard 4"),
]
STEPS, SEQUENCES, DONE = 3, 16, 2  # the third loss depends on the optimizer's loaded state


@pytest.fixture(scope="module")
def saved(token_folder, tmp_path_factory):
    """Return a function from preset to config, and losses and sequences after its checkpoint."""
    made = {}

    def save_and_continue(preset: str) -> tuple[dict, list[float], np.ndarray]:
        if preset not in made:
            folder = tmp_path_factory.mktemp(preset)
            config = {
                "model": {"preset": preset, "overrides": SHAPES[preset]},
                "data": {"path": str(token_folder), "sequence_length": 32},
                "batch": {"micro_batch_size": 2, "sequences": SEQUENCES},
                "optimizer": {"lr": 1e-3, "warmup_steps": 2},
                "train": {"steps": 20, "eval_sequences": 0, "sample_tokens": 0},
                "run": {"folder": str(folder / "run"), "tensorboard": False, "peak_tflops": 1.0},
                "checkpoint": {"folder": str(folder / "kept")},
            }
            ranks, degrees = SAVED
            nl.spmd.run(train_to_checkpoint, ranks, args=(config | {"parallel": degrees},))
            made[preset] = config, *steps_of(config, ranks, degrees)
        return made[preset]

    return save_and_continue


def train_to_checkpoint(rank: int, config: dict) -> None:
    nl.Trainer(config | {"train": config["train"] | {"stop_after": DONE}}).fit()


class RecordingLoader:
    """Loader that records its batches."""

    def __init__(self, loader):
        self.loader, self.batches = loader, []

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def __next__(self):
        step = next(self.loader)
        self.batches.append(np.stack([batch["input_ids"].numpy() for batch in step]))
        return step


def steps_after(rank: int, config: dict) -> tuple[list[float], int, np.ndarray]:
    """Return losses, data rank, and the tokens of this rank: [steps, micro-batches, B, S]."""
    trainer = nl.Trainer(config)
    assert trainer.first_step == DONE
    trainer.loader = RecordingLoader(trainer.loader)
    losses = [trainer.step()["loss"] for _ in range(STEPS)]
    return losses, trainer.loader.data_rank, np.stack(trainer.loader.batches)


def steps_of(config: dict, ranks: int, degrees: dict) -> tuple[list[float], np.ndarray]:
    """Return losses after the checkpoint, and the sequences of all ranks: [steps, N, S]."""
    found = nl.spmd.run(steps_after, ranks, args=(config | {"parallel": degrees},))
    by_reader = {}
    for losses, reader, tokens in found:
        assert losses == found[0][0]
        assert np.array_equal(by_reader.setdefault(reader, tokens), tokens)
    interleaved = np.stack([by_reader[reader] for reader in sorted(by_reader)], axis=2)
    return found[0][0], interleaved.reshape(STEPS, SEQUENCES, -1)


@pytest.mark.parametrize(("preset", "layout"), CASES)
def test_resume_on_another_layout_reproduces_losses_and_samples(preset, layout, saved):
    config, losses, sequences = saved(preset)
    found, read = steps_of(config, *LAYOUTS[layout])
    assert np.array_equal(read, sequences)
    assert found == pytest.approx(losses, abs=1e-6)
