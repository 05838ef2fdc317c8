"""Long documents encoded in pieces have the ids of the whole."""

import json
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_prep
from data_prep import documents, pieces
from data_prep.adversarial import strings
from data_prep.backends import Encoder
from data_prep.tokenizer import TextTokenizer
from nearlinear.errors import DataError

PARTS = st.one_of(
    st.sampled_from(["a ", "a\n", "don't ", "don'", "s ", "  ", " \n", "\r\n", "12", "é ", "\u00a0",
                     "x  y", "<|endoftext|>", "日本 ", "a\u2028", "Z\t", "!", "I'LL ", " b",
                     "\x85"]),
    st.text(max_size=6),
)  # fmt: skip
TEXTS = st.lists(PARTS, min_size=1, max_size=60).map("".join)


def split_by(gpt2, pattern):
    """GPT-2's vocabulary with another pattern of words, as Llama 3 and Qwen 2 write theirs."""
    document = json.loads(gpt2.json_text)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {**byte_level, "use_regex": False},
    ]}  # fmt: skip
    return TextTokenizer("split", json.dumps(document), gpt2.eos_token)


@pytest.fixture(scope="module")
def tokenizers(gpt2):
    return [gpt2, *(split_by(gpt2, pattern) for pattern in pieces._ENDING_WORDS)]


@settings(max_examples=50, deadline=None)
@given(text=TEXTS, size=st.integers(2, 40))
def test_pieces_have_the_ids_of_the_whole(tokenizers, text, size):
    before, pieces.PIECE = pieces.PIECE, size
    try:
        cut = list(pieces.pieces(text))
    finally:
        pieces.PIECE = before
    assert "".join(cut) == text and all(cut[:-1])
    for words in tokenizers:
        assert [i for piece in cut for i in words.encode(piece)] == words.encode(text)


@pytest.mark.parametrize("backend", ["fastokens", "gigatoken", "tokenizers"])
def test_every_encoder_encodes_a_long_document_so(gpt2, backend, monkeypatch):
    if backend != "tokenizers":
        pytest.importorskip(backend)
    long = " ".join(strings(400))
    texts = ["a b", long, "", long[::-1], "c d"]
    whole = [gpt2.encode(text) for text in texts]
    monkeypatch.setattr(pieces, "PIECE", 300)
    encode, sizes = Encoder(gpt2, (backend,)), []
    inner = encode._encode
    monkeypatch.setattr(
        encode, "_encode", lambda texts: sizes.extend(map(len, texts)) or inner(texts)
    )
    ids, lengths = encode(texts)
    assert lengths.tolist() == list(map(len, whole)) and len(sizes) > 20
    assert np.array_equal(ids, [i for ids in whole for i in ids])


def test_where_nothing_proves_it_nothing_is_cut(gpt2, monkeypatch, caplog):
    document = json.loads(gpt2.json_text)
    spaces = {"id": 50257, "content": "a b", "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False, "special": False}  # fmt: skip
    for change in (
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}},
        {"added_tokens": [*document["added_tokens"], spaces]},
        {"added_tokens": [{**spaces, "content": "x", "rstrip": True}]},
    ):
        words = TextTokenizer("other", json.dumps({**document, **change}), gpt2.eos_token)
        assert not pieces.can_cut(words), change
    assert pieces.can_cut(gpt2)
    monkeypatch.setattr(pieces, "PIECE", 100)
    monkeypatch.setattr(pieces, "LONG", 150)
    encode = Encoder(gpt2, ("tokenizers",))
    with caplog.at_level(logging.WARNING):
        encode(["word " * 200])
        assert not caplog.text
        encode(["1" * 200])
    assert "200 characters are encoded at once, more than 150: there is no place" in caplog.text


def test_a_prepared_long_document_is_the_same(tmp_path, gpt2, source, read_documents, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 500)
    texts = ["one two", "word and word\n" * 400, "three"]
    data_prep.prepare(source(texts), tmp_path / "d", val_fraction=0, progress=False)
    assert read_documents(tmp_path / "d")["train"] == [gpt2.encode(text) for text in texts]


def test_a_document_of_too_many_tokens_to_count_is_refused(tmp_path, source, monkeypatch):
    monkeypatch.setattr(documents, "MOST_TOKENS", 20)
    options = {"val_fraction": 0, "progress": False}
    data_prep.prepare(source(["x" * 19]), tmp_path / "d", **options)
    with pytest.raises(DataError, match="has 20 bytes, of which there may be 19: cut it before"):
        data_prep.prepare(source(["x", "é" * 10]), tmp_path / "e", **options)
