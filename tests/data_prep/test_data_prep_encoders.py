"""Encoders give the ids of the reference, or are not used."""

import json
import random
from itertools import chain

import numpy as np
import pytest

from data_prep import encoders, tokenizer_checks
from data_prep.encoders import Encoder, get_encoder
from data_prep.tokenizer import TextTokenizer, load
from nearlinear.errors import DataError

FAST = ("fastokens", "gigatoken")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a tokenizer like Llama 3's: byte-level, with a split pattern and control tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" \
              r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # fmt: skip
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end_of_text|>", "<|eot_id|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_checks.adversarial_strings(2000), trainer)
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    tokenizer.save(str(path))
    return load(str(path))


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("kind", ["gpt2", "trained"])
def test_encoder_gives_reference_ids_for_adversarial_text(request, name, kind):
    pytest.importorskip(name)
    words = request.getfixturevalue(kind)
    encode = Encoder(words, (name,))
    assert encode.name.startswith(name)
    texts = list(tokenizer_checks.adversarial_strings({"gpt2": 60_000, "trained": 2500}[kind]))
    ids, lengths = encode(texts)
    expected = words.encode_batch(texts)
    assert lengths.tolist() == list(map(len, expected))
    assert ids.tolist() == list(chain.from_iterable(expected))
    assert words.eos_id not in ids


def test_adversarial_strings_are_diverse_and_deterministic():
    texts = list(tokenizer_checks.adversarial_strings(3000))
    assert texts == list(tokenizer_checks.adversarial_strings(3000))
    assert len(set(texts)) > 2800
    assert all(text.encode() is not None for text in texts)
    for piece in ("<|endoftext|>", "\r\n", "\x85", "\u0301", "٣", "\U00020000", "'ll"):
        assert sum(piece in text for text in texts) > 10


def test_encoder_selects_the_fastest_installed_backend(gpt2, monkeypatch):
    pytest.importorskip("fastokens")
    assert get_encoder(gpt2).name.startswith("fastokens ")
    assert Encoder(gpt2, ("tokenizers",)).name == "tokenizers"

    def missing(name):
        raise encoders.PackageNotFoundError(name)

    monkeypatch.setattr(encoders, "version", missing)
    assert Encoder(gpt2).name == "tokenizers"
    with pytest.raises(DataError, match="no backend 'quick': use fastokens, gigatoken"):
        Encoder(gpt2, ("quick",))


def wrong_for(text):
    """Return a backend maker whose ids are wrong for texts that contain `text`."""

    def make(words: TextTokenizer):
        right = encoders._tokenizers_backend(words)

        def encode(texts):
            ids, lengths = right(texts)
            if any(text in one for one in texts):
                ids = ids.copy()
                ids[-1] ^= 1
            return ids, lengths

        return encode

    return make


def test_encoder_rejects_a_backend_with_wrong_ids(gpt2, monkeypatch, caplog):
    monkeypatch.setitem(encoders._BACKEND_MAKERS, "fastokens", wrong_for("\u0301"))
    monkeypatch.setitem(encoders._BACKEND_MAKERS, "gigatoken", wrong_for("never seen before"))
    encode = Encoder(gpt2)
    assert encode.name.startswith("gigatoken")
    assert "fastokens" in caplog.text and "for adversarial text" in caplog.text
    encode.verify_sample(["plain text"] * 3)
    assert encode.name.startswith("gigatoken")
    encode.verify_sample(["plain", "a text never seen before"])
    assert encode.name == "tokenizers"
    assert "its ids differ from those of tokenizers for this text" in caplog.text
    np.testing.assert_array_equal(
        encode(["never seen before"])[0], gpt2.encode("never seen before")
    )


@pytest.mark.parametrize("settings", ["single_word", "lstrip", "rstrip", "normalized"])
def test_encoder_rejects_a_backend_wrong_for_added_tokens(gpt2, monkeypatch, caplog, settings):
    document = json.loads(gpt2.json_text)
    token = {"id": 50257, "content": "zebra", "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": False}  # fmt: skip
    document["added_tokens"].append(token | {settings: True})
    words = TextTokenizer("own", json.dumps(document), gpt2.eos_token)
    texts = list(tokenizer_checks.strings_with_tokens(["zebra"]))
    expected = words.encode_batch(texts)
    assert 50257 in expected[0] and any("zebra" in text for text in texts)
    for name in FAST:  # right or not used
        assert Encoder(words, (name,))(texts)[0].tolist() == [i for one in expected for i in one]
    monkeypatch.setitem(encoders._BACKEND_MAKERS, "fastokens", wrong_for("zebra"))
    assert Encoder(gpt2, ("fastokens",)).name.startswith("fastokens")
    assert Encoder(words, ("fastokens",)).name == "tokenizers"
    assert "its ids differ from those of tokenizers for adversarial text" in caplog.text


def test_encoder_rejects_a_backend_that_raises(gpt2, monkeypatch, caplog):
    def cannot(words):
        raise ValueError("model type of another kind")

    def fails(words):
        def encode(texts):
            raise RuntimeError("too odd")

        return encode

    monkeypatch.setitem(encoders._BACKEND_MAKERS, "fastokens", cannot)
    monkeypatch.setitem(encoders._BACKEND_MAKERS, "gigatoken", fails)
    assert Encoder(gpt2).name == "tokenizers"
    assert "cannot read this tokenizer (model type" in caplog.text
    assert "failed on adversarial text (too odd)" in caplog.text


def test_encoder_ignores_truncation_of_the_tokenizer_file(tmp_path, gpt2):
    document = json.loads(gpt2.json_text)
    document["truncation"] = {"direction": "Right", "max_length": 2,
                              "strategy": "LongestFirst", "stride": 0}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    text = " ".join(random.Random(0).choices(["one", "two", "three"], k=50))
    ids, _ = Encoder(load(str(tmp_path)))([text])
    assert ids.tolist() == gpt2.encode(text)
