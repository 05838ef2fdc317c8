"""Sealed JSON: limits of nesting and keys, and keys of signatures."""

import json

import pytest

from nearlinear.checkpoint.sealed_json import (
    KEY_FILE_VARIABLE,
    KEY_VARIABLE,
    MAX_DEPTH,
    parse,
    signing_key,
)
from nearlinear.errors import CheckpointError


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nesting_is_limited(opening, closing):
    def nested(depth):
        return b'{"a":' + (opening * (depth - 1) + "1" + closing * (depth - 1)).encode() + b"}"

    assert parse(nested(MAX_DEPTH)) == json.loads(nested(MAX_DEPTH))
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} deep"):
        parse(nested(MAX_DEPTH + 1))
    closed = (opening + "1" + closing + ",").encode() * 100
    with pytest.raises(ValueError, match="deep"):  # also behind values that are closed
        parse(b'{"b":[' + closed + nested(MAX_DEPTH - 1) + b"]}")
    parse(b'{"b":[' + closed + nested(MAX_DEPTH - 2) + b"]}")


def test_brackets_of_strings_and_closed_ones_do_not_count():
    data = {"a": "[" * 100, 'quoted "{{': ["\\\\", "[" * 100], "b": [[]] * 100, "c": [{}] * 100}
    assert parse(json.dumps(data).encode()) == data
    assert parse(b"{}") == {}


def test_duplicate_keys_are_refused():
    with pytest.raises(ValueError, match="key 'b' occurs more than once"):
        parse(b'{"x": {"a": 1, "b": 2, "b": 3}}')
    with pytest.raises(ValueError, match="not an object"):
        parse(b"[1]")


def test_key_file_is_named_if_it_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "key"))
    with pytest.raises(CheckpointError, match=r"key cannot be read \(No such file"):
        signing_key()
    (tmp_path / "key").write_bytes(b"k" * 16 + b"\n")
    assert signing_key() == b"k" * 16
    monkeypatch.setenv(KEY_VARIABLE, "k" * 16)
    with pytest.raises(CheckpointError, match="are both set"):
        signing_key()
    monkeypatch.delenv(KEY_FILE_VARIABLE)
    monkeypatch.setenv(KEY_VARIABLE, "k" * 15)
    with pytest.raises(CheckpointError, match="has 15 bytes: use at least 16"):
        signing_key()
