"""Checkpoints: the same values at any layout, and clear words for anything that is not one."""

import json
import pickle

import pytest
import torch
import torch.distributed as dist

import nearlinear as nl
from nearlinear.checkpoint import file, index, kept, reading
from nearlinear.errors import CheckpointError
from nearlinear.spmd.failures import RankError
from nearlinear.storage.disk import Disk
from tests.support import tiny

ROWS = 8


def on(ranks: int, function, *arguments) -> list:
    return nl.spmd.run(function, ranks=ranks, args=arguments)


def started(degree: int, kind: str, optimizer: str = "adamw", seed: int = 0):
    mesh = nl.init({"hybrid_shard_degree": degree})
    with nl.spmd.one_at_a_time(seed=seed):
        model = tiny.MODELS[kind]()
    nl.shard(model)
    return mesh, model, tiny.optimizer_for(model, optimizer)


def steps_of(mesh, model, updates, rank: int, steps) -> list[float]:
    """Losses of these steps over all ranks."""
    losses = []
    for step in steps:
        ids = tiny.rows(step, ROWS).chunk(mesh.data_ranks)[mesh.data_rank(rank)]
        for batch in nl.accumulate(model, [tiny.batch(ids)]):
            loss = model(**batch).loss
            loss.backward()
        updates.step()
        updates.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / mesh.data_ranks)
    return losses


def whole(model, updates) -> dict[str, torch.Tensor]:
    """Every parameter and every state of the optimizer, gathered."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().full_tensor().clone()
        for key, value in updates.state[parameter].items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{name}.{key}"] = full.clone()
    return found


def saves(rank, folder, degree, kind, optimizer="adamw"):
    mesh, model, updates = started(degree, kind, optimizer)
    steps_of(mesh, model, updates, rank, range(2))
    nl.save(folder, model, updates, step=2)
    saved = whole(model, updates)
    return saved, steps_of(mesh, model, updates, rank, range(2, 5))


def loads(rank, folder, degree, kind, optimizer="adamw"):
    mesh, model, updates = started(degree, kind, optimizer, seed=1)
    assert nl.load(folder, model, updates) == 2
    loaded = whole(model, updates)
    return loaded, steps_of(mesh, model, updates, rank, range(2, 5))


@pytest.mark.parametrize(
    ("kind", "optimizer", "ranks", "degree"),
    [("gpt2", "adamw", 4, 2), ("llama", "adamw", 8, 4), ("gpt2", "sgd", 2, 2)],
)
def test_any_layout_reads_what_any_layout_wrote(kind, optimizer, ranks, degree, tmp_path):
    saved, after = on(ranks, saves, str(tmp_path), degree, kind, optimizer)[0]
    for others, theirs in ((1, 1), (2, 1), (4, 4), (8, 2), (8, 8)):
        found = on(others, loads, str(tmp_path), theirs, kind, optimizer)
        for loaded, losses in found:
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[name], value) for name, value in saved.items())
            assert losses == pytest.approx(after, abs=1e-6)


def test_every_block_is_written_once_and_replicas_share_the_work(tmp_path):
    on(4, saves, str(tmp_path), 2, "gpt2")
    found = index.read(tmp_path)
    assert len(found.files) == 4 and found.world == 4
    kept_bytes = [file.bytes for file in found.files.values()]
    assert max(kept_bytes) < 1.5 * min(kept_bytes)
    embedding = found.tensors["model/transformer.wte.weight"]
    rows = sorted((piece.offset[0], piece.shape[0]) for (piece,) in embedding.pieces.values())
    assert rows == [(0, 49), (49, 48)]
    assert "model/lm_head.weight" not in found.tensors  # tied to the embedding
    assert not any("partial" in path.name for path in tmp_path.iterdir())


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "step-00000002"
    on(2, saves, str(folder), 2, "gpt2")
    return folder


def refused(folder, kind="gpt2", optimizer="adamw") -> str:
    with pytest.raises(RankError) as caught:
        on(2, loads, str(folder), 2, kind, optimizer)
    assert isinstance(caught.value.__cause__, CheckpointError)
    return str(caught.value.__cause__)


def test_a_changed_byte_is_found(checkpoint):
    path = next(checkpoint.glob("rank-00001*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert f"{path} has changed since it was written" in refused(checkpoint)


def reads(rank, folder, degree):
    _, model, updates = started(degree, "gpt2", seed=1)
    nl.load(folder, model, updates)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_file_is_hashed_and_by_its_own_rank_alone(ranks, tmp_path, monkeypatch):
    """Though all ranks read from it: the counts of steps, which one rank has written."""
    on(4, saves, tmp_path, 4, "gpt2")
    hashed, streamed = [], reading.Streamed

    def noted(path):
        hashed.append(path.name)
        return streamed(path)

    monkeypatch.setattr(reading, "Streamed", noted)
    on(ranks, reads, tmp_path, ranks)
    assert set(hashed) == {f"rank-{rank:05d}-of-00004.safetensors" for rank in range(4)}
    assert ranks != 4 or len(hashed) == 4


def test_a_file_that_cannot_be_read_is_told_to_all(checkpoint, monkeypatch):
    opened = Disk.reader

    def forbidden(self):
        if self.name.startswith("rank-00001"):
            raise PermissionError(13, "Permission denied")
        return opened(self)

    monkeypatch.setattr(Disk, "reader", forbidden)
    said = refused(checkpoint)
    assert "rank-00001-of-00002.safetensors cannot be read (Permission denied)" in said


def test_a_missing_file_a_short_file_and_no_index(checkpoint):
    path = next(checkpoint.glob("rank-00001*"))
    data = path.read_bytes()
    path.write_bytes(data[:-8])
    assert f"{path.name} has {len(data) - 8} bytes instead of {len(data)}" in refused(checkpoint)
    path.unlink()
    assert f"{path.name} is missing" in refused(checkpoint)
    (checkpoint / "index.json").unlink()
    assert "was not finished" in refused(checkpoint)
    assert "does not exist" in refused(checkpoint / "elsewhere")


def test_another_model_and_another_optimizer(checkpoint):
    assert "is of another model" in refused(checkpoint, kind="llama")
    assert "state of AdamW was saved" in refused(checkpoint, optimizer="sgd")


class Bomb:
    def __reduce__(self):
        return (print, ("exploded",))


def test_a_pickle_is_refused_in_every_file(checkpoint, capfd):
    bomb = pickle.dumps(Bomb())
    files = sorted(path.name for path in checkpoint.iterdir())
    originals = {name: (checkpoint / name).read_bytes() for name in files}
    for name in files:
        (checkpoint / name).write_bytes(bomb)
        refused(checkpoint)
        (checkpoint / name).write_bytes(originals[name])
    # The index may vouch for it: safetensors still does not run it.
    name = next(name for name in files if name.startswith("rank-00000"))
    (checkpoint / name).write_bytes(bomb)
    data = json.loads(originals["index.json"])
    found = index.digest(checkpoint / name)
    data["files"][name] = {"bytes": found.bytes, "sha256": found.sha256}
    (checkpoint / "index.json").write_text(json.dumps(data))
    assert "cannot be read" in refused(checkpoint)
    assert "exploded" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("tensors"),
        lambda data: data.update(format=99),
        lambda data: data["files"].update({"../../etc/passwd": {"bytes": 1, "sha256": ""}}),
        lambda data: next(iter(data["tensors"].values()))["pieces"].clear(),
        lambda data: data.update(step="many"),
    ],
)
def test_an_index_that_makes_no_sense(checkpoint, change):
    path = checkpoint / "index.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    assert "index.json" in refused(checkpoint)


def keeps(rank, folder):
    mesh, model, updates = started(2, "gpt2")
    for step in (1, 2, 3):
        steps_of(mesh, model, updates, rank, [step])
        kept.keep(folder, 2, step, model, updates)
    newest = kept.latest(folder)
    return newest.name


def test_the_newest_are_kept_and_what_was_not_finished_goes(tmp_path):
    (tmp_path / "step-00000000").mkdir()
    assert set(on(2, keeps, str(tmp_path))) == {"step-00000003"}
    assert kept.steps(tmp_path) == [2, 3]
    there = [kept.LATEST, "step-00000002", "step-00000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == there


def saves_twice(rank, folder):
    _, model, _ = started(2, "gpt2")
    kept.keep(folder, 2, 1, model)
    try:
        kept.keep(folder, 2, 2, model).wait()
    except CheckpointError as error:
        return str(error)


def test_a_full_disk_is_told_to_all_and_costs_no_older_checkpoint(tmp_path, monkeypatch):
    write = file.write

    def full(path, blocks):
        if path.parent.name == "step-00000002" and "rank-00001" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, blocks)

    monkeypatch.setattr(file, "write", full)
    said = on(2, saves_twice, str(tmp_path))
    assert said[0] == said[1] and "rank 1 cannot write" in said[0]
    assert "No space left on device" in said[0]
    assert kept.steps(tmp_path) == [1]
