"""Divergence sentinel: fingerprints see single bits, and a run stops before it saves bad state."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import nearlinear as nl
from nearlinear.checkpoint import save
from nearlinear.errors import RankError
from nearlinear.train.callbacks import Callback, divergence
from nearlinear.train.callbacks.divergence import (
    combine,
    find_different,
    groups_of_copies,
    groups_of_replicas,
    hash_tensor,
)


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit of one element of a contiguous tensor, in place."""
    whole = {2: torch.int16, 4: torch.int32, 1: torch.int8}[tensor.element_size()]
    words = tensor.view(-1).view(whole)
    limit = 8 * tensor.element_size() - 1
    words[element] ^= -(1 << limit) if bit == limit else 1 << bit


@pytest.mark.parametrize("size", [1, 7, 8, divergence._CHUNK * 2 + 6, 3 * divergence._BLOCK + 10])
def test_hash_equals_a_sum_over_python_integers(size):
    tensor = torch.randn(size)
    columns, rows = (table.numpy().view(np.uint64) for table in divergence._make_tables("cpu"))
    data = tensor.numpy().tobytes()
    words = np.frombuffer(data + b"\0" * (-len(data) % 8), np.uint64)
    expected = 0
    for row, start in enumerate(range(0, len(words), divergence._CHUNK)):
        part = words[start : start + divergence._CHUNK]
        with np.errstate(over="ignore"):
            total = (part * columns[: len(part)]).sum(dtype=np.uint64)
        expected += int(total) * int(rows[row % divergence._CHUNK])
    assert combine([hash_tensor(tensor)]) == expected % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_any_flipped_bit_and_any_exchange_changes_the_hash(dtype):
    tensor = torch.randn(9, 5).to(dtype)
    known = int(hash_tensor(tensor))
    assert int(hash_tensor(tensor.clone())) == known
    assert int(hash_tensor(tensor.t().contiguous().t())) == known, "the layout in memory is no part"
    for element, bit in itertools.product(range(45), range(8 * tensor.element_size())):
        changed = tensor.clone()
        flip(changed, element, bit)
        assert int(hash_tensor(changed)) != known
    bits = tensor.view(torch.uint8).view(9, -1)
    for one, other in itertools.combinations(range(9), 2):
        if not bits[one].equal(bits[other]):
            changed = tensor.clone()
            changed.view(torch.uint8)[[one, other]] = changed.view(torch.uint8)[[other, one]]
            assert int(hash_tensor(changed)) != known


def test_one_mantissa_bit_on_one_of_four_ranks_is_found_in_every_trial():
    generator, ranks = random.Random(0), {0: [0, 1, 2, 3]}
    weights = [torch.randn(65, 33), torch.randn(33), torch.randn(128, 65)]
    for _ in range(50):
        replicas = [[weight.clone() for weight in weights] for _ in range(4)]
        faulty = generator.randrange(4)
        weight = generator.choice(replicas[faulty])
        flip(weight, generator.randrange(weight.numel()), generator.randrange(23))
        hashes = [combine(map(hash_tensor, replica)) for replica in replicas]
        assert find_different(hashes, ranks) == [faulty]


@pytest.mark.parametrize(
    ("values", "faulty"),
    [
        ([1, 1, 1, 1], []),
        ([1, 1, 2, 1], [2]),
        ([1, 2, 1, 2], [0, 1, 2, 3]),
        ([3, 1, 2, 1], [0, 1, 2, 3]),
    ],
)
def test_majority_decides(values, faulty):
    assert find_different(values, {"all": [0, 1, 2, 3]}) == faulty


def test_norms_may_differ_in_their_last_digits_only():
    merged = divergence._merge_close(
        [2.0, 2.0 * (1 + 1e-14), 2.0 * (1 + 1e-6), float("nan"), float("nan")], {0: [0, 1, 2, 3, 4]}
    )
    assert merged == [2.0, 2.0, 2.0 * (1 + 1e-6), "nan", "nan"]


def test_groups_hold_the_ranks_with_equal_values():
    mesh = nl.Mesh(pipeline=1, replicate=2, shard=2, tensor=2)
    assert sorted(groups_of_replicas(mesh).values()) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert sorted(groups_of_copies(mesh).values()) == [[0, 2, 4, 6], [1, 3, 5, 7]]


class FlipBit(Callback):
    """Flip a bit of one rank's state after a step."""

    def __init__(self, rank: int, step: int, of_optimizer: bool):
        self.rank, self.step, self.of_optimizer = rank, step, of_optimizer

    def on_setup(self, trainer):
        self.trainer = trainer

    def on_step_end(self, step, metrics):
        if step.number == self.step and nl.distributed.runtime.current().rank == self.rank:
            [parameter] = (
                p for name, p in self.trainer.model.named_parameters()
                if name.endswith("h.1.mlp.c_fc.weight")
            )  # fmt: skip
            if self.of_optimizer:
                parameter = self.trainer.optimizer.state[parameter]["exp_avg"]
            flip(parameter.detach().to_local(), 3, 2)


def train(rank: int, config: dict, arguments: tuple) -> None:
    nl.Trainer(config, callbacks=[FlipBit(*arguments)]).fit()


@pytest.mark.parametrize(
    ("degree", "of_optimizer", "every", "words"),
    [
        (1, False, 0, r"step 4: after step 3, .*: rank 2 \(host \S+\) in \S*h.1.mlp.c_fc.weight"),
        (1, True, 1, r"checkpoint of step 3, .*rank 2 \(host \S+\) in exp_avg of \S*h.1"),
        (2, False, 0, r"one of rank 0 \(host \S+\), rank 2 \(host \S+\) \(two replicas"),
    ],
)  # fmt: skip
def test_run_stops_and_keeps_its_good_checkpoints(
    small_run, tmp_path, degree, of_optimizer, every, words
):
    small_run["parallel"] = {"hybrid_shard_degree": degree}
    small_run["train"] = {"steps": 8, "eval_sequences": 0, "sample_tokens": 0}
    small_run["train"]["divergence_every"] = 4
    small_run["run"]["memory_report"] = False
    kept = tmp_path / "kept"
    small_run["checkpoint"] = {"folder": str(kept), "every": every, "keep": 1}
    with pytest.raises(RankError, match=words):
        nl.spmd.run(train, 4, args=(small_run, (2, 3, of_optimizer)))
    # the checkpoint of step 2 may still have been in progress
    assert max(save.steps(kept), default=0) in ((1, 2) if every else (0,))
    clean = small_run | {"checkpoint": {"folder": str(tmp_path / "clean"), "keep": 1, "every": 1}}
    if every:  # no false alarm: the same run without a fault
        nl.spmd.run(train, 4, args=(clean, (4, 3, False)))
        assert max(save.steps(Path(tmp_path / "clean"))) == 8


def corrupted_gather(rank: int, config: dict) -> None:
    """Corrupt a gathered weight on rank 1, between the gather and the sentinel's hook."""
    trainer = nl.Trainer(config)
    block = trainer.model.transformer.h[1]

    def corrupt(module, arguments):
        if rank == 1 and torch.is_grad_enabled():
            flip(module.mlp.c_fc.weight.data, 5, 3)

    block.register_forward_pre_hook(corrupt)
    hooks = block._forward_pre_hooks
    [sentinel] = (key for key, hook in hooks.items() if "_hash_gathered" in hook.__qualname__)
    hooks.move_to_end(sentinel)
    trainer.fit()


def test_wrong_gather_is_found_among_ranks_of_one_copy(small_run):
    small_run["train"] = {"steps": 2, "eval_sequences": 0, "sample_tokens": 0}
    small_run["train"]["divergence_every"] = 2
    small_run["run"]["memory_report"] = False
    with pytest.raises(RankError, match=r"step 2: the parameters gathered .* on rank 1 \(host"):
        nl.spmd.run(corrupted_gather, 4, args=(small_run,))
