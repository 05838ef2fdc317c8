"""Safetensors readers for storage without memory mapping, sequential and random access."""

import json
import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from nearlinear.checkpoint import index, reader, safetensors_file
from nearlinear.storage import StoragePath
from nearlinear.storage.local import LocalPath
from nearlinear.storage.s3 import _split_into_parts
from nearlinear.storage.threads import map_concurrent

TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=4).filter(lambda name: name != "__metadata__"),
    st.tuples(
        st.sampled_from(list(safetensors_file.DTYPES)), st.lists(st.integers(0, 4), max_size=3)
    ),
    max_size=5,
)


class RemoteFile(LocalPath):
    """File without memory mapping, streamed in chunks of a few bytes."""

    path = property(lambda self: None)
    reader = StoragePath.reader

    def __init__(self, path):
        object.__setattr__(self, "data", path.read_bytes())

    def size(self):
        return len(self.data)

    def stream(self, begin=0, end=None):
        some = self.data[begin:end]
        return (some[at : at + 5] for at in range(0, len(some), 5))


def write_tensors(path, tensors) -> dict[str, torch.Tensor]:
    made = {}
    for name, (dtype, shape) in tensors.items():
        count = math.prod(shape) * dtype.itemsize
        bits = torch.arange(count).remainder(2 if dtype is torch.bool else 256)
        made[name] = bits.to(torch.uint8).view(dtype).view(shape)
    path.write_bytes(save(made))
    return made


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = (safetensors_file.tensor_bytes(each.contiguous()) for each in (one, other))
    return (one.dtype, one.shape) == (other.dtype, other.shape) and next(bits) == next(bits)


@settings(deadline=None, max_examples=60)
@given(tensors=TENSORS, data=st.data())
def test_readers_match_safetensors_library_for_any_slice(tmp_path_factory, tensors, data):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    made = write_tensors(path, tensors)
    hashing_reader = reader.HashingReader(RemoteFile(path))
    with safe_open(path, "pt") as expected, reader.open_tensors(RemoteFile(path)) as found:
        assert sorted(found.keys()) == sorted(expected.keys()) == sorted(made)
        with hashing_reader.tensors() as streamed:
            wanted = data.draw(st.lists(st.sampled_from(found.keys()))) if made else []
            for key in (key for key in streamed.keys() if key in wanted):  # noqa: SIM118
                assert same_bits(streamed.get_tensor(key), made[key])
                assert same_bits(found.get_tensor(key), made[key])
                reference_slice, shape = expected.get_slice(key), made[key].shape
                for our_slice in (streamed.get_slice(key), found.get_slice(key)):
                    assert (our_slice.get_shape(), our_slice.get_dtype()) == (
                        reference_slice.get_shape(), reference_slice.get_dtype())  # fmt: skip
                    if shape:
                        ends = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))
                                for n in shape]  # fmt: skip
                        inside = tuple(slice(*end) for end in ends)
                        assert same_bits(our_slice[inside], made[key][inside])
    assert hashing_reader.finish() == index.hash_file(path) == index.hash_file(RemoteFile(path))


@pytest.mark.parametrize("place", [LocalPath, RemoteFile])
def test_read_into_fills_contiguous_tensors_of_equal_dtype(place, tmp_path):
    specs = {"a": (torch.float32, (3, 5)), "b": (torch.bfloat16, (4, 2)), "c": (torch.int64, ())}
    made = write_tensors(tmp_path / "f", specs)
    hashing_reader = reader.HashingReader(place(tmp_path / "f"))
    targets = {name: torch.zeros_like(value) for name, value in made.items()}
    with hashing_reader.tensors() as values:
        for name in values.keys():  # noqa: SIM118
            if name == "b":
                assert not values.read_into(name, targets[name].T)
                assert not values.read_into(name, targets[name].float())
                targets[name].copy_(values.get_tensor(name))
            else:
                assert values.read_into(name, targets[name])
    assert all(same_bits(targets[name], value) for name, value in made.items())
    assert hashing_reader.finish() == index.hash_file(tmp_path / "f")


HEADERS = {
    "no JSON": b"{",
    "no table": b"[]",
    "unknown dtype": json.dumps({"a": {"dtype": "X", "shape": [1], "data_offsets": [0, 1]}}),
    "a gap": json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}),
    "wrong size": json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}}),
    "negative shape": json.dumps({"a": {"dtype": "U8", "shape": [-1, -1], "data_offsets": [0, 1]}}),
    "no offsets": json.dumps({"a": {"dtype": "U8", "shape": [1]}}),
    "no entry": json.dumps({"a": 3}),
}


@pytest.mark.parametrize("header", [*HEADERS, "cut short", "too long", "empty file"])
def test_invalid_file_raises_and_is_hashed_completely(tmp_path, header):
    text = HEADERS.get(header, b"{}")
    text = text if isinstance(text, bytes) else text.encode()
    length = {"cut short": 100, "too long": 2**62}.get(header, len(text))
    data = b"" if header == "empty file" else length.to_bytes(8, "little") + text
    path = tmp_path / "a"
    path.write_bytes(data)
    hashing_reader = reader.HashingReader(RemoteFile(path))
    with pytest.raises(SafetensorError), hashing_reader.tensors():
        pass
    assert hashing_reader.finish() == index.hash_file(path)
    with pytest.raises(SafetensorError):
        reader.open_tensors(RemoteFile(path))


@given(sizes=st.lists(st.integers(0, 20)), size=st.integers(1, 12))
def test_split_into_parts_gives_equal_sizes_except_the_last(sizes, size):
    whole = bytes(i % 251 for i in range(sum(sizes)))
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    chunks = [memoryview(whole)[at : at + n] for at, n in zip(begins, sizes, strict=True)]
    parts = list(_split_into_parts(chunks, size))
    assert b"".join(parts) == whole
    assert all(len(part) == size for part in parts[:-1]) and all(parts)


def test_map_concurrent_is_ordered_and_bounds_inflight_items():
    results, three_workers = [], threading.Barrier(3)

    def items():
        for number in range(9):
            assert number - len(results) < 3, "more items were requested than there are workers"
            yield number

    def work(number: int) -> int:
        three_workers.wait(30)  # passes only with three concurrent workers
        return -number

    for result in map_concurrent(work, items(), 3):
        results.append(result)
    assert results == [-number for number in range(9)]


def test_map_concurrent_stops_at_the_first_error():
    ended = []

    def work(number: int) -> None:
        if number == 1:
            raise OSError("broken")
        ended.append(number)

    with pytest.raises(OSError, match="broken"):
        list(map_concurrent(work, range(100), 4))
    assert 0 in ended and len(ended) < 10
