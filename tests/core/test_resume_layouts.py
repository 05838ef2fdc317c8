"""A run saved on 8 ranks goes on on any number, in any layout: same losses, same samples."""

import numpy as np
import pytest

import nearlinear as nl

SAVED = (8, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2})  # and 2 replicas
LAYOUTS = {
    "1": (1, {}),
    "shard 2": (2, {"hybrid_shard_degree": 2}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
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
    | {"num_experts_per_tok": 4},  # all: of two nearly equal ones rounding would choose
}
CASES = [
    *[("gpt2-tiny", layout) for layout in LAYOUTS if "expert" not in layout],
    ("llama-tiny", "1"),
    ("llama-tiny", "tensor 2"),
    ("llama-tiny", "pipeline 2 x tensor 2 x replicate 2"),
    ("mixtral-tiny", "shard 2"),
    ("mixtral-tiny", "expert 2 x tensor 2 x shard 4"),
]
STEPS, SEQUENCES, DONE = 5, 16, 3


@pytest.fixture(scope="module")
def saved(token_folder, tmp_path_factory):
    """Of each preset: a config with a checkpoint at SAVED's layout, and the steps that follow."""
    made = {}

    def of(preset: str) -> tuple[dict, list[float], np.ndarray]:
        if preset not in made:
            folder = tmp_path_factory.mktemp(preset)
            config = {
                "model": {"preset": preset, "overrides": SHAPES[preset]},
                "data": {"path": str(token_folder), "sequence_length": 32},
                "batch": {"micro_batch_size": 2, "sequences": SEQUENCES},
                "optimizer": {"lr": 1e-3, "warmup_steps": 2},
                "train": {"steps": 20, "eval_sequences": 0, "sample_tokens": 0},
                "run": {"folder": str(folder / "run"), "tensorboard": False},
                "checkpoint": {"folder": str(folder / "kept")},
            }
            ranks, degrees = SAVED
            nl.spmd.run(to_the_checkpoint, ranks, args=(config | {"parallel": degrees},))
            made[preset] = config, *steps_of(config, ranks, degrees)
        return made[preset]

    return of


def to_the_checkpoint(rank: int, config: dict) -> None:
    nl.Trainer(config | {"train": config["train"] | {"stop_after": DONE}}).fit()


class Noted:
    """A loader that remembers what it gave out."""

    def __init__(self, loader):
        self.loader, self.given = loader, []

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def __next__(self):
        step = next(self.loader)
        self.given.append(np.stack([batch["input_ids"].numpy() for batch in step]))
        return step


def steps_after(rank: int, config: dict) -> tuple[list[float], int, np.ndarray]:
    """Losses, where this rank reads, and the tokens it read: [steps, micro-batches, B, S]."""
    trainer = nl.Trainer(config)
    assert trainer.first_step == DONE
    trainer.loader = Noted(trainer.loader)
    losses = [trainer.step()["loss"] for _ in range(STEPS)]
    return losses, trainer.loader.data_rank, np.stack(trainer.loader.given)


def steps_of(config: dict, ranks: int, degrees: dict) -> tuple[list[float], np.ndarray]:
    """Losses after the checkpoint, and the sequences of all ranks in order: [steps, N, S]."""
    found = nl.spmd.run(steps_after, ranks, args=(config | {"parallel": degrees},))
    by_reader = {}
    for losses, reader, tokens in found:
        assert losses == found[0][0]
        assert np.array_equal(by_reader.setdefault(reader, tokens), tokens)
    in_turn = np.stack([by_reader[reader] for reader in sorted(by_reader)], axis=2)
    return found[0][0], in_turn.reshape(STEPS, SEQUENCES, -1)


@pytest.mark.parametrize(("preset", "layout"), CASES)
def test_losses_and_samples_are_those_of_the_layout_that_saved(preset, layout, saved):
    config, losses, sequences = saved(preset)
    found, read = steps_of(config, *LAYOUTS[layout])
    assert np.array_equal(read, sequences)
    assert found == pytest.approx(losses, abs=1e-6)
