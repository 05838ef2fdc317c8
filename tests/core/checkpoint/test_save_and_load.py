"""`nl.save` and `nl.load`: values on any layout, and errors for invalid checkpoints."""

import pickle

import pytest
import torch
import torch.distributed as dist

import nearlinear as nl
from nearlinear.checkpoint import index, reader, safetensors_file, save
from nearlinear.errors import CheckpointError, RankError
from nearlinear.storage.local import LocalPath
from tests.support import indexes, tiny

ROWS = 8


def run_on(ranks: int, function, *arguments) -> list:
    return nl.spmd.run(function, ranks=ranks, args=arguments)


def build(degree: int, kind: str, optimizer: str = "adamw", seed: int = 0):
    mesh = nl.init({"hybrid_shard_degree": degree})
    with nl.spmd.one_at_a_time(seed=seed):
        model = tiny.MODELS[kind]()
    nl.shard(model)
    return mesh, model, tiny.optimizer_for(model, optimizer)


def train_steps(mesh, model, updates, rank: int, steps) -> list[float]:
    """Train for ``steps``; return the losses averaged over all ranks."""
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


def gather_state(model, updates) -> dict[str, torch.Tensor]:
    """Gather all parameters and optimizer states."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().full_tensor().clone()
        for key, value in updates.state[parameter].items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{name}.{key}"] = full.clone()
    return found


def save_and_train(rank, folder, degree, kind, optimizer="adamw"):
    mesh, model, updates = build(degree, kind, optimizer)
    train_steps(mesh, model, updates, rank, range(2))
    nl.save(folder, model, updates, step=2)
    saved = gather_state(model, updates)
    return saved, train_steps(mesh, model, updates, rank, range(2, 5))


def load_and_train(rank, folder, degree, kind, optimizer="adamw"):
    mesh, model, updates = build(degree, kind, optimizer, seed=1)
    assert nl.load(folder, model, updates) == 2
    loaded = gather_state(model, updates)
    return loaded, train_steps(mesh, model, updates, rank, range(2, 5))


@pytest.mark.parametrize(
    ("kind", "optimizer", "ranks", "degree", "layouts"),
    [
        ("gpt2", "adamw", 4, 2, [(1, 1), (2, 1), (4, 4), (8, 2)]),
        ("llama", "adamw", 8, 4, [(1, 1), (8, 8)]),
        ("gpt2", "sgd", 2, 2, [(4, 4)]),
    ],
)
def test_checkpoint_loads_in_any_layout(kind, optimizer, ranks, degree, layouts, tmp_path):
    saved, after = run_on(ranks, save_and_train, str(tmp_path), degree, kind, optimizer)[0]
    for others, theirs in layouts:
        found = run_on(others, load_and_train, str(tmp_path), theirs, kind, optimizer)
        for loaded, losses in found:
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[name], value) for name, value in saved.items())
            assert losses == pytest.approx(after, abs=1e-6)


def test_each_shard_is_written_once_and_replicas_share_the_writes(tmp_path):
    run_on(4, save_and_train, str(tmp_path), 2, "gpt2")
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
    run_on(2, save_and_train, str(folder), 2, "gpt2")
    return folder


def load_error(folder, kind="gpt2", optimizer="adamw") -> str:
    with pytest.raises(RankError) as caught:
        run_on(2, load_and_train, str(folder), 2, kind, optimizer)
    assert isinstance(caught.value.__cause__, CheckpointError)
    return str(caught.value.__cause__)


def test_load_detects_a_changed_byte(checkpoint):
    path = next(checkpoint.glob("rank-00001*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert f"{path} has changed since it was written" in load_error(checkpoint)


def load_only(rank, folder, degree):
    _, model, updates = build(degree, "gpt2", seed=1)
    nl.load(folder, model, updates)


def test_random_state_of_another_number_of_ranks_is_not_restored(checkpoint):
    def load(rank):
        before = torch.get_rng_state()
        load_only(rank, checkpoint, 1)
        return torch.equal(torch.get_rng_state(), before)

    torch.manual_seed(5)
    assert run_on(1, load) == [True]


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_load_hashes_each_file_on_one_rank(ranks, tmp_path, monkeypatch):
    """Hash the file with the step counts on a single rank, although all ranks read it."""
    run_on(4, save_and_train, tmp_path, 4, "gpt2")
    hashed, streamed = [], reader.HashingReader

    def noted(path):
        hashed.append(path.name)
        return streamed(path)

    monkeypatch.setattr(reader, "HashingReader", noted)
    run_on(ranks, load_only, tmp_path, ranks)
    assert set(hashed) == {f"rank-{rank:05d}-of-00004.safetensors" for rank in range(4)}
    assert ranks != 4 or len(hashed) == 4


def test_unreadable_file_raises_on_all_ranks(checkpoint, monkeypatch):
    opened = LocalPath.reader

    def forbidden(self):
        if self.name.startswith("rank-00001"):
            raise PermissionError(13, "Permission denied")
        return opened(self)

    monkeypatch.setattr(LocalPath, "reader", forbidden)
    message = load_error(checkpoint)
    assert "rank-00001-of-00002.safetensors cannot be read (Permission denied)" in message


def test_load_refuses_missing_and_truncated_files(checkpoint):
    path = next(checkpoint.glob("rank-00001*"))
    data = path.read_bytes()
    path.write_bytes(data[:-8])
    assert f"{path.name} has {len(data) - 8} bytes instead of {len(data)}" in load_error(checkpoint)
    path.unlink()
    assert f"{path.name} is missing" in load_error(checkpoint)
    (checkpoint / "index.json").unlink()
    assert "is not a complete checkpoint" in load_error(checkpoint)
    assert "does not exist" in load_error(checkpoint / "elsewhere")


def test_load_refuses_another_model_or_optimizer(checkpoint):
    assert "is of another model" in load_error(checkpoint, kind="llama")
    assert "state of optimizer AdamW" in load_error(checkpoint, optimizer="sgd")


class Bomb:
    def __reduce__(self):
        return (print, ("exploded",))


def test_load_never_unpickles(checkpoint, capfd):
    bomb = pickle.dumps(Bomb())
    files = sorted(path.name for path in checkpoint.iterdir())
    originals = {name: (checkpoint / name).read_bytes() for name in files}
    for name in files:
        (checkpoint / name).write_bytes(bomb)
        load_error(checkpoint)
        (checkpoint / name).write_bytes(originals[name])
    # Even with a matching hash in the index, safetensors does not run the pickle.
    name = next(name for name in files if name.startswith("rank-00000"))
    (checkpoint / name).write_bytes(bomb.ljust(len(originals[name]), b"\0"))
    indexes.update_hash(checkpoint, checkpoint / name)
    assert "cannot be read" in load_error(checkpoint)
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
def test_invalid_index_raises(checkpoint, change):
    indexes.edit_index(checkpoint, change)
    assert "index.json" in load_error(checkpoint)


def save_and_prune_steps(rank, folder):
    mesh, model, updates = build(2, "gpt2")
    for step in (1, 2, 3):
        train_steps(mesh, model, updates, rank, [step])
        pending = save.save_and_prune(folder, 2, step, model, updates)
    return pending.wait().name


def test_retention_keeps_newest_and_deletes_unfinished_checkpoints(tmp_path):
    (tmp_path / "step-00000000").mkdir()
    assert set(run_on(2, save_and_prune_steps, str(tmp_path))) == {"step-00000003"}
    assert save.steps(tmp_path) == [2, 3]
    there = [save.LATEST, "step-00000002", "step-00000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == there


def saves_twice(rank, folder):
    _, model, _ = build(2, "gpt2")
    save.save_and_prune(folder, 2, 1, model)
    try:
        save.save_and_prune(folder, 2, 2, model).wait()
    except CheckpointError as error:
        return str(error)


def test_full_disk_raises_on_all_ranks_and_keeps_older_checkpoints(tmp_path, monkeypatch):
    write = safetensors_file.write_file

    def full(path, *rest):
        if path.parent.name == "step-00000002" and "rank-00001" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, *rest)

    monkeypatch.setattr(safetensors_file, "write_file", full)
    message = run_on(2, saves_twice, str(tmp_path))
    assert message[0] == message[1] and "rank 1 cannot write" in message[0]
    assert "No space left on device" in message[0]
    assert save.steps(tmp_path) == [1]
