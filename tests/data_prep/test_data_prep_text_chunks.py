"""Long documents encoded in chunks have the ids of the whole."""

import json
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_prep
from data_prep import documents, text_chunks
from data_prep.encoders import Encoder
from data_prep.tokenizer import TextTokenizer
from data_prep.tokenizer_checks import adversarial_strings
from nearlinear.errors import DataError

PARTS = st.one_of(
    st.sampled_from(["a ", "a\n", "don't ", "don'", "s ", "  ", " \n", "\r\n", "12", "é ", "\u00a0",
                     "x  y", "<|endoftext|>", "日本 ", "a\u2028", "Z\t", "!", "I'LL ", " b",
                     "\x85"]),
    st.text(max_size=6),
)  # fmt: skip
TEXTS = st.lists(PARTS, min_size=1, max_size=60).map("".join)


def split_by(gpt2, pattern):
    """Return GPT-2's vocabulary with another word pattern, like those of Llama 3 and Qwen 2."""
    document = json.loads(gpt2.json_text)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {**byte_level, "use_regex": False},
    ]}  # fmt: skip
    return TextTokenizer("split", json.dumps(document), gpt2.eos_token)


@pytest.fixture(scope="module")
def tokenizers(gpt2):
    return [gpt2, *(split_by(gpt2, pattern) for pattern in text_chunks._SAFE_PATTERNS)]


@settings(max_examples=50, deadline=None)
@given(text=TEXTS, size=st.integers(2, 40))
def test_chunks_have_the_ids_of_the_whole_text(tokenizers, text, size):
    before, text_chunks.CHUNK_CHARACTERS = text_chunks.CHUNK_CHARACTERS, size
    try:
        cut = list(text_chunks.split_text(text))
    finally:
        text_chunks.CHUNK_CHARACTERS = before
    assert "".join(cut) == text and all(cut[:-1])
    for tokenizer in tokenizers:
        assert [i for piece in cut for i in tokenizer.encode(piece)] == tokenizer.encode(text)


@pytest.mark.parametrize("backend", ["fastokens", "gigatoken", "tokenizers"])
def test_encoder_splits_long_documents_without_changing_ids(gpt2, backend, monkeypatch):
    if backend != "tokenizers":
        pytest.importorskip(backend)
    long = " ".join(adversarial_strings(400))
    texts = ["a b", long, "", long[::-1], "c d"]
    whole = [gpt2.encode(text) for text in texts]
    monkeypatch.setattr(text_chunks, "CHUNK_CHARACTERS", 300)
    encode, sizes = Encoder(gpt2, (backend,)), []
    inner = encode._encode
    monkeypatch.setattr(
        encode, "_encode", lambda texts: sizes.extend(map(len, texts)) or inner(texts)
    )
    ids, lengths = encode(texts)
    assert lengths.tolist() == list(map(len, whole)) and len(sizes) > 20
    assert np.array_equal(ids, [i for ids in whole for i in ids])


def test_text_is_not_split_without_a_provably_safe_cut(gpt2, monkeypatch, caplog):
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
        tokenizer = TextTokenizer("other", json.dumps({**document, **change}), gpt2.eos_token)
        assert not text_chunks.can_split(tokenizer), change
    assert text_chunks.can_split(gpt2)
    monkeypatch.setattr(text_chunks, "CHUNK_CHARACTERS", 100)
    monkeypatch.setattr(text_chunks, "WARN_CHARACTERS", 150)
    encode = Encoder(gpt2, ("tokenizers",))
    with caplog.at_level(logging.WARNING):
        encode(["word " * 200])
        assert not caplog.text
        encode(["1" * 200])
    assert "encoding 200 characters at once, more than 150, because no safe cut" in caplog.text


def test_prepared_long_document_has_reference_ids(
    tmp_path, gpt2, source, read_documents, monkeypatch
):
    monkeypatch.setattr(text_chunks, "CHUNK_CHARACTERS", 500)
    texts = ["one two", "word and word\n" * 400, "three"]
    data_prep.prepare(source(texts), tmp_path / "d", val_fraction=0, progress=False)
    assert read_documents(tmp_path / "d")["train"] == [gpt2.encode(text) for text in texts]


def test_document_longer_than_an_index_counts_is_refused(tmp_path, source, monkeypatch):
    monkeypatch.setattr(documents, "MOST_TOKENS", 20)
    options = {"val_fraction": 0, "progress": False}
    data_prep.prepare(source(["x" * 19]), tmp_path / "d", **options)
    with pytest.raises(DataError, match="has 20 bytes, but at most 19 are supported: cut it first"):
        data_prep.prepare(source(["x", "é" * 10]), tmp_path / "e", **options)
