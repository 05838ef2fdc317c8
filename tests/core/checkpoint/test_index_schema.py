"""The schema of an index refuses what is never written, without help from hashes."""

import errno
import itertools
import json

import pytest

from nearlinear import storage
from nearlinear.checkpoint import index, index_schema, shards
from nearlinear.errors import CheckpointDamaged

FILE = "rank-00000-of-00001.safetensors"
LIMIT = index_schema.MAX_INTEGER


def tensor(*shards, shape=(2, 3), **others):
    pieces = {FILE: [{"offset": list(at), "shape": list(size)} for at, size in shards]}
    return {"dtype": "float32", "shape": list(shape), "pieces": pieces} | others


def parse(**changes):
    valid = {
        "step": 0,
        "world": 1,
        "tensors": {"model/w": tensor(((0, 0), (2, 3)))},
        "files": {FILE: {"bytes": 24, "sha256": "0" * 64}},
        "values": {},
    }
    return index_schema.parse(json.loads(json.dumps(valid | changes)), sealed=False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"step": LIMIT},
        {"tensors": {"model/w": tensor(((0, 0), (1, 3)), ((1, 0), (1, 3)))}},
        {"tensors": {"model/empty": {"dtype": "int64", "shape": [0], "pieces": {}}}},
        {"tensors": {}, "files": {FILE: {"bytes": 0, "sha256": "0" * 64}}},
    ],
)
def test_valid_index_is_parsed(changes):
    parsed = parse(**changes)
    assert set(parsed.tensors) == set(changes.get("tensors", ["model/w"]))
    assert parsed.step == changes.get("step", 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step": LIMIT + 1}, "is not an integer of at least 0"),
        ({"step": True}, "is not an integer"),
        ({"world": 0}, "is not an integer of at least 1"),
        ({"code": ""}, "an unknown key code"),
        ({"files": {FILE: {"bytes": 23, "sha256": "0" * 64}}}, "has 23 bytes, and its shards 24"),
        ({"files": {FILE: {"bytes": 24, "sha256": "0" * 64, "x": 0}}}, "an unknown key x"),
        ({"files": {f".{FILE}": {"bytes": 24, "sha256": "0" * 64}}}, "no safetensors file"),
        ({"files": {}}, "which is not in the list of files"),
        ({"tensors": {"model/w": tensor(((0, 0), (2, 3)), code="")}}, "an unknown key code"),
        ({"tensors": {"model/w": tensor()}}, "has no shards in"),
        ({"tensors": {"model/w": tensor(((0, 0), (1, 3)))}}, "do not cover"),
        ({"tensors": {"model/w": tensor(((0, 0), (2, 3)), ((1, 0), (1, 3)))}}, "overlap"),
        ({"tensors": {"model/w": tensor(((1, 0), (2, 3)))}}, "outside of the tensor"),
        ({"tensors": {"model/w": tensor(((0,), (2,)))}}, "outside of the tensor"),
        ({"tensors": {"model/w": tensor(shape=(2**40, 2**40), pieces={})}}, "too many elements"),
        ({"tensors": {"model/w": tensor(shape=[1] * 33, pieces={})}}, "at most 32 integers"),
        ({"tensors": {"w": tensor(((0, 0), (2, 3)))}}, "in none of the groups"),
        ({"tensors": {"optimizer/w/step": tensor(((0, 0), (2, 3)))}}, "without the settings"),
    ],
)
def test_invalid_index_is_refused_with_the_reason(changes, reason):
    with pytest.raises(ValueError, match=reason):
        parse(**changes)


@pytest.mark.parametrize("dims", [shards.MAX_SPLIT_DIMS, shards.MAX_SPLIT_DIMS + 1])
def test_tensors_are_divided_along_few_dims(dims):
    """The corners to compare double with every dim."""
    halves = [((*at,), (1,) * dims) for at in itertools.product([0, 1], repeat=dims)]
    w = tensor(*halves, shape=(2,) * dims)
    files = {FILE: {"bytes": 4 * 2**dims, "sha256": "0" * 64}}
    if dims > shards.MAX_SPLIT_DIMS:
        with pytest.raises(ValueError, match=f"model/w is divided along {dims} dims"):
            parse(tensors={"model/w": w}, files=files)
    else:
        parse(tensors={"model/w": w}, files=files)


@pytest.mark.parametrize(
    ("number", "damaged"), [(errno.ENOENT, True), (errno.EIO, True), (errno.EACCES, False)]
)
def test_only_a_lost_file_counts_as_damage(tmp_path, number, damaged):
    """A run falls back to an older checkpoint for damage, and stops for a missing permission."""
    error = OSError(number, "reason")
    found = index.unreadable(storage.as_path(tmp_path) / FILE, error)
    assert isinstance(found, CheckpointDamaged) == damaged
