"""Files that come by ranges: what the library reads of them, in one pass or in any order."""

import json
import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from nearlinear.checkpoint import index, reading, stream
from nearlinear.storage.disk import Disk
from nearlinear.storage.place import Place
from nearlinear.storage.s3 import _parts
from nearlinear.storage.threads import side_by_side

TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=4).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(list(stream.DTYPES)), st.lists(st.integers(0, 4), max_size=3)),
    max_size=5,
)


class Far(Disk):
    """A file that memory cannot be mapped to, in chunks of a few bytes."""

    path = property(lambda self: None)
    reader = Place.reader

    def __init__(self, path):
        object.__setattr__(self, "data", path.read_bytes())

    def size(self):
        return len(self.data)

    def stream(self, begin=0, end=None):
        some = self.data[begin:end]
        return (some[at : at + 5] for at in range(0, len(some), 5))


def written(path, tensors) -> dict[str, torch.Tensor]:
    made = {}
    for name, (dtype, shape) in tensors.items():
        count = math.prod(shape) * dtype.itemsize
        bits = torch.arange(count).remainder(2 if dtype is torch.bool else 256)
        made[name] = bits.to(torch.uint8).view(dtype).view(shape)
    path.write_bytes(save(made))
    return made


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = (stream.bytes_of(each.contiguous()) for each in (one, other))
    return (one.dtype, one.shape) == (other.dtype, other.shape) and next(bits) == next(bits)


@settings(deadline=None, max_examples=60)
@given(tensors=TENSORS, data=st.data())
def test_any_tensor_and_any_part_of_it(tmp_path_factory, tensors, data):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    made = written(path, tensors)
    passing = reading.Streamed(Far(path))
    with safe_open(path, "pt") as expected, reading.opened(Far(path)) as found:
        assert sorted(found.keys()) == sorted(expected.keys()) == sorted(made)
        with passing.tensors() as gone_by:
            wanted = data.draw(st.lists(st.sampled_from(found.keys()))) if made else []
            for key in (key for key in gone_by.keys() if key in wanted):  # noqa: SIM118
                assert same(gone_by.get_tensor(key), made[key])
                assert same(found.get_tensor(key), made[key])
                theirs, shape = expected.get_slice(key), made[key].shape
                for ours in (gone_by.get_slice(key), found.get_slice(key)):
                    assert (ours.get_shape(), ours.get_dtype()) == (
                        theirs.get_shape(), theirs.get_dtype())  # fmt: skip
                    if shape:
                        ends = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))
                                for n in shape]  # fmt: skip
                        inside = tuple(slice(*end) for end in ends)
                        assert same(ours[inside], made[key][inside])
    assert passing.looks() == index.digest(path) == index.digest(Far(path))


@pytest.mark.parametrize("place", [Disk, Far])
def test_a_tensor_goes_straight_to_where_its_bytes_can_go(place, tmp_path):
    of = {"a": (torch.float32, (3, 5)), "b": (torch.bfloat16, (4, 2)), "c": (torch.int64, ())}
    made = written(tmp_path / "f", of)
    passing = reading.Streamed(place(tmp_path / "f"))
    there = {name: torch.zeros_like(value) for name, value in made.items()}
    with passing.tensors() as values:
        for name in values.keys():  # noqa: SIM118
            if name == "b":
                assert not values.put(name, there[name].T)
                assert not values.put(name, there[name].float())
                there[name].copy_(values.get_tensor(name))
            else:
                assert values.put(name, there[name])
    assert all(same(there[name], value) for name, value in made.items())
    assert passing.looks() == index.digest(tmp_path / "f")


HEADERS = {
    "no JSON": b"{",
    "no table": b"[]",
    "no such dtype": json.dumps({"a": {"dtype": "X", "shape": [1], "data_offsets": [0, 1]}}),
    "a gap": json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}),
    "another size": json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}}),
    "less than nothing": json.dumps(
        {"a": {"dtype": "U8", "shape": [-1, -1], "data_offsets": [0, 1]}}
    ),
    "no offsets": json.dumps({"a": {"dtype": "U8", "shape": [1]}}),
    "no entry": json.dumps({"a": 3}),
}


@pytest.mark.parametrize("header", [*HEADERS, "cut short", "too long", "nothing"])
def test_what_is_no_such_file(tmp_path, header):
    text = HEADERS.get(header, b"{}")
    text = text if isinstance(text, bytes) else text.encode()
    length = {"cut short": 100, "too long": 2**62}.get(header, len(text))
    data = b"" if header == "nothing" else length.to_bytes(8, "little") + text
    path = tmp_path / "a"
    path.write_bytes(data)
    passing = reading.Streamed(Far(path))
    with pytest.raises(SafetensorError), passing.tensors():
        pass
    assert passing.looks() == index.digest(path)
    with pytest.raises(SafetensorError):
        reading.opened(Far(path))


@given(sizes=st.lists(st.integers(0, 20)), size=st.integers(1, 12))
def test_parts_have_one_size_but_the_last(sizes, size):
    whole = bytes(i % 251 for i in range(sum(sizes)))
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    chunks = [memoryview(whole)[at : at + n] for at, n in zip(begins, sizes, strict=True)]
    parts = list(_parts(chunks, size))
    assert b"".join(parts) == whole
    assert all(len(part) == size for part in parts[:-1]) and all(parts)


def test_work_side_by_side_is_in_order_and_bounded():
    given, all_there = [], threading.Barrier(3)

    def items():
        for number in range(9):
            assert number - len(given) < 3, "more was asked for than there is room"
            yield number

    def work(number: int) -> int:
        all_there.wait(30)  # three at a time, or never
        return -number

    for result in side_by_side(work, items(), 3):
        given.append(result)
    assert given == [-number for number in range(9)]


def test_work_side_by_side_ends_with_its_first_error():
    ended = []

    def work(number: int) -> None:
        if number == 1:
            raise OSError("broken")
        ended.append(number)

    with pytest.raises(OSError, match="broken"):
        list(side_by_side(work, range(100), 4))
    assert 0 in ended and len(ended) < 10
