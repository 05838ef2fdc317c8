"""Divergence sentinel: fingerprints see single bits, and a run stops before it saves bad state."""

import functools
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import nearlinear as nl
from nearlinear.checkpoint import save
from nearlinear.checkpoint.verify import compare_checkpoints
from nearlinear.errors import RankError
from nearlinear.train.callbacks import Callback, divergence
from nearlinear.train.callbacks.divergence import (
    ReplicasDiverged,
    combine,
    describe_different,
    find_different,
    find_diverged_replicas,
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


def told(norm: float, *states: int) -> dict:
    return {"norm": norm, "fingerprints": list(states)}


@pytest.mark.parametrize(
    ("payloads", "faulty", "words"),
    [
        ({0: told(1.0, 5, 6), 2: told(1.0, 5, 6)}, [], ""),
        ({0: told(1.0), 1: told(1.0 + 1e-13), 2: told(1.0)}, [], ""),
        ({0: told(math.nan), 1: told(math.nan)}, [], ""),
        ({0: told(1.0, 5, 6), 1: told(1.0), 2: told(1.0, 5, 6)}, [], ""),  # not compared by all
        ({0: None, 1: None}, [], ""),
        ({0: told(1, 5, 6), 2: told(2, 5, 7), 3: told(3, 5, 6)}, [2],
         "replica 2 (rank 1 of it) held another state than the others before this step"),
        ({0: told(1.0, 5), 1: told(1.0, 6)}, [0, 1],
         "one of replicas 0, 1 held another state than the others before this step"),
        ({0: told(1.0), 1: told(1.1), 2: told(1.0)}, [1],
         "replica 1 computed another gradient norm than the others"),
        ({0: told(1.0, 5), 1: told(1.1), 2: told(1.0, 5)}, [1],
         "replica 1 computed another gradient norm than the others"),
    ],
)  # fmt: skip
def test_elastic_replicas_that_differ_from_the_majority_are_found(payloads, faulty, words):
    assert find_diverged_replicas(payloads) == faulty
    if faulty:
        assert describe_different(payloads, faulty) == words


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


class FlipBitOnce(FlipBit):
    """Flip the bit once, as memory does, and not again when the step is repeated."""

    rewound = None

    def on_step_end(self, step, metrics):
        if self.rewound is None:
            super().on_step_end(step, metrics)

    def on_rewind(self, number):
        self.rewound = number


def train_with_replay(rank: int, config: dict, kind: type, arguments: tuple) -> int | None:
    faults = kind(*arguments)
    nl.Trainer(config, callbacks=[faults]).fit()
    return getattr(faults, "rewound", None)


def replayed_run(small_run: dict, folder: Path) -> dict:
    small_run["parallel"] = {"hybrid_shard_degree": 1}
    small_run["train"] = {"steps": 8, "eval_sequences": 0, "sample_tokens": 0,
                          "divergence_every": 4, "on_divergence": "replay"}  # fmt: skip
    small_run["run"] |= {"folder": str(folder / "run"), "memory_report": False, "log_every": 1}
    checkpoint = {"folder": str(folder / "kept"), "every": 2, "keep": 1}
    return small_run | {"checkpoint": checkpoint}


def test_replay_after_a_flipped_bit_ends_in_the_state_of_an_undisturbed_run(
    small_run, tmp_path, capfd
):
    faulty = replayed_run(small_run, tmp_path / "faulty")
    run = functools.partial(nl.spmd.run, train_with_replay, 2)
    rewound = run(args=(faulty, FlipBitOnce, (1, 3, False)))
    assert rewound == [2, 2]
    output = capfd.readouterr().out
    assert "Repeating the steps after step 2, the newest checkpoint" in output
    assert "found no difference up to step 4: a bit was flipped" in output
    rows = (tmp_path / "faulty" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 9))
    clean = replayed_run(small_run, tmp_path / "clean")
    run(args=(clean, FlipBitOnce, (2, 3, False)))  # no such rank
    folders = (save.step_folder(Path(each["checkpoint"]["folder"]), 8) for each in (faulty, clean))
    different = (each.name for each in compare_checkpoints(*folders))
    # ranks that are threads share one random generator, whose state this run does not use
    assert not [name for name in different if not name.startswith("random/")]


@pytest.mark.parametrize(
    ("step", "kept", "words"),
    [
        (3, 2, r"step 4: after step 3, .*\. The replay .* same step on the same ranks: a determin"),
        (1, 0, r"before the checkpoint of step 2, .*there is no checkpoint to replay from"),
    ],
)
def test_fault_that_comes_back_is_called_deterministic(small_run, tmp_path, step, kept, words):
    config = replayed_run(small_run, tmp_path)
    with pytest.raises(RankError, match=words):
        nl.spmd.run(train_with_replay, 2, args=(config, FlipBit, (1, step, False)))
    assert max(save.steps(tmp_path / "kept"), default=0) == kept


def test_different_faults_of_a_step_and_its_replay_point_to_hardware():
    first = ReplicasDiverged("step 4: rank 1", 4, [1])
    assert "a deterministic bug" in str(ReplicasDiverged("again", 4, [1]).judge_replay(first))
    for step, ranks in ((4, [2]), (3, [1])):
        verdict = str(ReplicasDiverged("now", step, ranks).judge_replay(first))
        assert "defective hardware" in verdict and "step 4: rank 1" in verdict


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
