"""Lines as they are written: whole ones only, whatever becomes of the file."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearlinear.errors import ConfigError
from nearlinear.watch.source import File, Pipe, Splitter


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


@given(st.lists(st.text("aé€😀 ="), max_size=6), st.data())
def test_lines_come_whole_however_the_bytes_are_cut(lines, data):
    whole = "".join(f"{line}\n" for line in lines).encode()
    cuts = data.draw(st.lists(st.integers(0, len(whole))).map(sorted))
    split, found = Splitter(), []
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += split(whole[begin:end])
    assert found == lines


def test_a_file_that_grows(tmp_path):
    path = tmp_path / "later.jsonl"
    source = File(path)
    assert source.new() == (False, [])  # not there yet
    append(path, "one\ntw")
    assert source.new() == (False, ["one"])
    assert source.new() == (False, [])
    append(path, "o\r\nthree\n")
    assert source.new() == (False, ["two", "three"])


def truncated(path):
    path.write_text("new\n")


def replaced(path):
    other = path.with_suffix(".partial")
    other.write_text("new\n" + "x" * 500)
    os.replace(other, path)


def rewritten_longer(path):
    """In place, and past where the reader was: only what it begins with tells."""
    path.write_text("new\n" + "x" * 500)


def removed_and_made_again(path):
    path.unlink()
    path.write_text("new\n")


@pytest.mark.parametrize("change", [truncated, replaced, rewritten_longer, removed_and_made_again])
def test_another_file_in_its_place_is_read_from_its_beginning(tmp_path, change):
    path = tmp_path / "metrics.jsonl"
    path.write_text("old 1\nold 2\nha")
    source = File(path)
    assert source.new() == (False, ["old 1", "old 2"])
    change(path)
    assert source.new() == (True, ["new"])
    assert source.new() == (False, [])


def test_a_file_that_is_gone_for_a_while(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, "one\n")
    source = File(path)
    source.new()
    os.rename(path, tmp_path / "aside")
    assert source.new() == (False, [])
    os.rename(tmp_path / "aside", path)
    append(path, "two\n")
    assert source.new() == (False, ["two"])


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match="metrics.jsonl cannot be read"):
        File(tmp_path / "metrics.jsonl").new()


def test_a_pipe_gives_all_that_came_and_says_when_it_has_ended():
    reading, writing = os.pipe()
    source = Pipe(reading)
    os.write(writing, b"one\ntw")
    assert not source.ended
    os.write(writing, b"o\nlast, without an end")
    os.close(writing)
    source.wait()
    assert source.ended
    assert source.new() == (False, ["one", "two", "last, without an end"])
    assert source.new() == (False, [])
