"""Followed files and pipes return complete lines, also when the file is replaced."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearlinear.cli.watch.history import FollowedFile, FollowedPipe, LineSplitter
from nearlinear.errors import ConfigError


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


@given(st.lists(st.text("aé€😀 ="), max_size=6), st.data())
def test_splitter_returns_complete_lines(lines, data):
    whole = "".join(f"{line}\n" for line in lines).encode()
    cuts = data.draw(st.lists(st.integers(0, len(whole))).map(sorted))
    split, found = LineSplitter(), []
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += split(whole[begin:end])
    assert found == lines


def test_followed_file_grows(tmp_path):
    path = tmp_path / "later.jsonl"
    source = FollowedFile(path)
    assert source.read_new() == (False, [])  # not there yet
    append(path, "one\ntw")
    assert source.read_new() == (False, ["one"])
    assert source.read_new() == (False, [])
    append(path, "o\r\nthree\n")
    assert source.read_new() == (False, ["two", "three"])


def truncated(path):
    path.write_text("new\n")


def replaced(path):
    other = path.with_suffix(".partial")
    other.write_text("new\n" + "x" * 500)
    os.replace(other, path)


def rewritten_longer(path):
    """Rewrite in place beyond the reader's offset: only the head of the file differs."""
    path.write_text("new\n" + "x" * 500)


def removed_and_made_again(path):
    path.unlink()
    path.write_text("new\n")


@pytest.mark.parametrize("change", [truncated, replaced, rewritten_longer, removed_and_made_again])
def test_replaced_file_is_read_from_its_beginning(tmp_path, change):
    path = tmp_path / "metrics.jsonl"
    path.write_text("old 1\nold 2\nha")
    source = FollowedFile(path)
    assert source.read_new() == (False, ["old 1", "old 2"])
    change(path)
    assert source.read_new() == (True, ["new"])
    assert source.read_new() == (False, [])


def test_followed_file_disappears_and_returns(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, "one\n")
    source = FollowedFile(path)
    source.read_new()
    os.rename(path, tmp_path / "aside")
    assert source.read_new() == (False, [])
    os.rename(tmp_path / "aside", path)
    append(path, "two\n")
    assert source.read_new() == (False, ["two"])


def test_unreadable_file_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match="metrics.jsonl cannot be read"):
        FollowedFile(tmp_path / "metrics.jsonl").read_new()


def test_pipe_returns_all_lines_and_ends():
    reading, writing = os.pipe()
    source = FollowedPipe(reading)
    os.write(writing, b"one\ntw")
    assert not source.ended
    os.write(writing, b"o\nlast, without an end")
    os.close(writing)
    source.wait()
    assert source.ended
    assert source.read_new() == (False, ["one", "two", "last, without an end"])
    assert source.read_new() == (False, [])
