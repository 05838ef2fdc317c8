"""Damaged and crafted checkpoints: nothing wrong is loaded, and runs fall back to intact ones."""

import dataclasses
import itertools
import json
import logging
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nearlinear as nl
from ci.faults import bit_flips, crafted
from nearlinear import cli, storage
from nearlinear.checkpoint import index, resume, sealed_json, shards
from nearlinear.errors import CheckpointDamaged, CheckpointError, RankError
from tests.core.checkpoint.test_save_and_load import (
    build,
    gather_state,
    load_only,
    run_on,
    train_steps,
)
from tests.core.train.test_resume import losses_until
from tests.support import tiny

KEY = "0123456789abcdef" * 2


def test_sample_of_bit_flips_and_crafted_indexes_is_refused_or_harmless(tmp_path):
    trials = bit_flips.Trials(tmp_path, seed=7)
    changes = len(crafted.STRUCTURAL) + len(crafted.SEMANTIC) + len(crafted.TEXTS)
    report = trials.run(flips=40, indexes=changes)
    assert report.failures == []
    assert sum(report.outcomes["crafted indexes"].values()) == changes
    assert report.outcomes["crafted indexes"][bit_flips.REFUSED] >= changes - 1  # random value


def splits(size: int):
    """Return a strategy of divisions of ``size`` into parts."""
    return st.lists(st.integers(1, 3), min_size=0, max_size=size).map(
        lambda cuts: sorted({0, *(at for at in itertools.accumulate(cuts) if at < size)})
    )


@given(st.data(), st.lists(st.integers(1, 5), max_size=3))
def test_tiling_equals_counting_every_element(data, shape):
    """A grid with one random change of a shard, compared with a count of covers per element."""
    ends = [data.draw(splits(size)) for size in shape]
    grid = [
        [(begin, end - begin) for begin, end in zip(cuts, [*cuts[1:], size], strict=True)]
        for cuts, size in zip(ends, shape, strict=True)
    ]
    boxes = [
        shards.TensorShard(tuple(b for b, _ in cell), tuple(n for _, n in cell))
        for cell in itertools.product(*grid)
    ]
    change = data.draw(st.sampled_from(["none", "drop", "repeat", "move", "resize"]))
    at = data.draw(st.integers(0, len(boxes) - 1))
    if change == "drop":
        del boxes[at]
    elif change == "repeat":
        boxes.append(boxes[at])
    elif change in ("move", "resize") and shape:
        dim, by = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.sampled_from([-1, 1]))
        offset, size = list(boxes[at].offset), list(boxes[at].shape)
        (offset if change == "move" else size)[dim] += by
        if offset[dim] < 0 or size[dim] < 1 or offset[dim] + size[dim] > shape[dim]:
            return
        boxes[at] = shards.TensorShard(tuple(offset), tuple(size))
    covered = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        covered[box.slices_in(shards.TensorShard.full(shape))] += 1
    assert shards.tile(tuple(shape), boxes) == bool((covered == 1).all())


def save_steps(rank, folder):
    """Save after steps 1 to 3; return the state after each step."""
    mesh, model, updates = build(2, "gpt2")
    states = {}
    for step in (1, 2, 3):
        train_steps(mesh, model, updates, rank, [step])
        nl.save(f"{folder}/step-{step:08d}", model, updates, step=step, wait=True)
        states[step] = gather_state(model, updates)
    return states


def resume_run(rank, folder, on_damage="fallback"):
    _, model, updates = build(2, "gpt2", seed=1)
    return resume.resume(storage.as_path(folder), model, updates, {}, on_damage), gather_state(
        model, updates
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, run_on(2, save_steps, str(folder))[0]


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "run"), saved[1]


def flip_data(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)


def flip_index(folder):
    data = bytearray((folder / index.NAME).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / index.NAME).write_bytes(data)


def truncate(folder):
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "has changed since it was written": flip_data,
    "SHA-256 does not match": flip_index,
    "instead of": truncate,
    "rank-00001-of-00002.safetensors is missing": lambda folder: (
        folder / "rank-00001-of-00002.safetensors"
    ).unlink(),
}


@pytest.mark.parametrize("cause", DAMAGES)
def test_damaged_checkpoint_falls_back_with_the_lost_steps_and_the_cause(run, cause, caplog):
    folder, states = run
    DAMAGES[cause](folder / "step-00000003")
    with caplog.at_level(logging.WARNING, logger="nearlinear"):
        for step, loaded in run_on(4, resume_run, str(folder)):
            assert step == 2 and loaded.keys() == states[2].keys()
            assert all(torch.equal(loaded[name], value) for name, value in states[2].items())
    texts = [r.message for r in caplog.records if r.name.endswith("resume")]
    assert len(texts) == 2, "rank 0 alone warns"
    assert "after step 3 is damaged" in texts[0] and cause in texts[0]
    assert "from the checkpoint after step 2: 1 step lost" in texts[1]


def test_index_may_grow_with_the_data_beside_it(run, monkeypatch):
    folder = run[0] / "step-00000001"
    data = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    least = (folder / index.NAME).stat().st_size - data // index.DATA_PER_INDEX_BYTE
    monkeypatch.setattr(index, "MAX_BYTES", least)
    assert index.read(storage.as_path(folder)).step == 1
    monkeypatch.setattr(index, "MAX_BYTES", least - 1)
    with pytest.raises(CheckpointDamaged, match=f"and {least - 1 + data // 16} are allowed"):
        index.read(storage.as_path(folder))


def test_on_damage_fail_raises_and_damage_of_all_checkpoints_always_raises(run):
    folder, _ = run
    flip_data(folder / "step-00000003")
    with pytest.raises(RankError, match='on_damage = "fallback" resumes') as caught:
        run_on(2, resume_run, str(folder), "fail")
    assert isinstance(caught.value.__cause__, CheckpointDamaged)
    flip_index(folder / "step-00000002")
    truncate(folder / "step-00000001")
    with pytest.raises(RankError, match="no checkpoint in .* is intact"):
        run_on(2, resume_run, str(folder))


def test_damage_seen_by_one_rank_is_damage_on_all(run, monkeypatch):
    """Rank 1 alone reads a changed index, as behind another node's file system."""
    folder, _ = run
    read = index.read

    def read_on_node(place):
        if torch.distributed.get_rank() == 1 and storage.as_path(place).name == "step-00000003":
            raise CheckpointDamaged("node b sees another index")
        return read(place)

    monkeypatch.setattr(index, "read", read_on_node)
    assert [step for step, _ in run_on(2, resume_run, str(folder))] == [2, 2]


def test_file_that_another_node_reads_otherwise_is_refused(run, monkeypatch):
    """The ranks that hash the files find no change."""

    def faults(name, values, found, keys=None):
        return iter(() if keys is None else [f"{name} belongs to another index"])

    monkeypatch.setattr(index, "header_faults", faults)
    with pytest.raises(RankError, match="cannot be read .* belongs to another index"):
        run_on(8, load_only, run[0] / "step-00000003", 8)


def load_tiny(rank, folder):
    _, model, updates = build(1, "gpt2", seed=1)
    nl.load(folder, model, updates)
    return gather_state(model, updates)


@pytest.mark.parametrize("ranks", [1, 2])
def test_older_format_loads_with_one_warning_about_missing_protection(ranks, run, caplog):
    folder, states = run
    crafted.write_unsealed(folder / "step-00000003")
    assert json.loads((folder / "step-00000003" / "index.json").read_text())["format"] == 2
    with caplog.at_level(logging.WARNING, logger="nearlinear"):
        loaded = run_on(ranks, load_tiny, str(folder / "step-00000003"))[0]
    assert all(torch.equal(loaded[name], value) for name, value in states[3].items())
    (warning,) = (r.message for r in caplog.records if r.name.endswith("load"))
    assert "has format 2" in warning and "cannot be detected" in warning


def test_signature_is_required_and_checked_while_a_key_is_set(run, tmp_path, monkeypatch, capsys):
    folder = run[0] / "step-00000003"
    key_file = tmp_path / "key"
    key_file.write_text(KEY)
    monkeypatch.setenv(sealed_json.KEY_FILE_VARIABLE, str(key_file))
    with pytest.raises(CheckpointDamaged, match="is not signed"):
        index.read(folder)
    assert cli.main(["checkpoint", "sign", str(folder)]) == 0
    assert index.read(folder).step == 3
    assert cli.main(["checkpoint", "verify", str(folder)]) == 0
    data = json.loads((folder / index.NAME).read_text())
    (folder / index.NAME).write_bytes(crafted.seal(data | {"step": 4}))
    with pytest.raises(CheckpointDamaged, match="not what was signed"):
        index.read(folder)
    signed = tmp_path / "signed"

    def save_signed(rank):
        _, model, updates = build(1, "gpt2")
        nl.save(signed, model, step=1, wait=True)

    run_on(1, save_signed)
    assert index.read(signed).step == 1
    key_file.write_text(KEY[::-1])
    with pytest.raises(CheckpointDamaged, match="another key signed it"):
        index.read(signed)
    key_file.write_text("short")
    with pytest.raises(CheckpointError, match="at least 16"):
        index.read(signed)
    monkeypatch.delenv(sealed_json.KEY_FILE_VARIABLE)
    assert index.read(signed).step == 1
    assert KEY not in capsys.readouterr().out


class Unequal:
    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        return {"rank": self.rank}


def test_save_refuses_values_that_differ_between_ranks(tmp_path):
    def work(rank):
        nl.init({})
        with nl.spmd.one_at_a_time(seed=0):
            model = tiny.gpt2(1)
        nl.shard(model)
        with pytest.raises(CheckpointError, match="ranks 0 and 1 passed different values"):
            nl.save(tmp_path / "unequal", model, wait=True, thing=Unequal(rank))

    run_on(2, work)
    assert not (tmp_path / "unequal" / index.NAME).exists()


def test_training_repeats_lost_steps_with_the_same_losses(small_run, tmp_path, caplog):
    small_run["train"] |= {"steps": 6, "eval_sequences": 0, "sample_tokens": 0}
    small_run["checkpoint"] = {"folder": str(tmp_path / "kept"), "every": 2}
    straight = nl.spmd.run(losses_until, 2, args=(small_run, 6))[0]
    shutil.rmtree(tmp_path / "kept")
    nl.spmd.run(losses_until, 2, args=(small_run, 4))
    flip_data(tmp_path / "kept" / "step-00000004")
    with caplog.at_level(logging.WARNING, logger="nearlinear"):
        resumed = nl.spmd.run(losses_until, 2, args=(small_run, 6))[0]
    assert resumed == straight[2:]
    assert any("after step 2: 2 steps lost" in record.message for record in caplog.records)
    small_run["checkpoint"]["on_damage"] = "fail"
    small_run["train"]["steps"] = 8
    flip_index(tmp_path / "kept" / "step-00000006")
    with pytest.raises(RankError, match="on_damage"):
        nl.spmd.run(losses_until, 2, args=(small_run, 8))


def test_ranks_that_read_different_checkpoints_refuse_both(run, monkeypatch):
    """Rank 1 sees the checkpoint of step 2 in the folder of step 3, as on a stale mount."""
    folder, _ = run
    read = index.read

    def read_on_node(place):
        stale = torch.distributed.get_rank() == 1 and storage.as_path(place).name[-1] == "3"
        return dataclasses.replace(read(place), step=2) if stale else read(place)

    monkeypatch.setattr(index, "read", read_on_node)
    with pytest.raises(RankError, match="ranks 0 and 1 have read different checkpoints"):
        run_on(2, resume_run, str(folder), "fail")
