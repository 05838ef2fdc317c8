"""Every encoder gives the ids of the reference, or is not used."""

import json
import random
from itertools import chain

import numpy as np
import pytest

from data_prep import adversarial, backends
from data_prep.backends import Encoder, encoder
from data_prep.tokenizer import TextTokenizer, load
from nearlinear.errors import DataError

FAST = ("fastokens", "gigatoken")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tokenizer as Llama 3's: byte-level, a pattern of its own, control tokens."""
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
    tokenizer.train_from_iterator(adversarial.strings(2000), trainer)
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    tokenizer.save(str(path))
    return load(str(path))


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("kind", ["gpt2", "trained"])
def test_ids_of_odd_text_are_those_of_the_reference(request, name, kind):
    pytest.importorskip(name)
    words = request.getfixturevalue(kind)
    encode = Encoder(words, (name,))
    assert encode.name.startswith(name)
    texts = list(adversarial.strings({"gpt2": 60_000, "trained": 2500}[kind]))
    ids, lengths = encode(texts)
    expected = words.encode_batch(texts)
    assert lengths.tolist() == list(map(len, expected))
    assert ids.tolist() == list(chain.from_iterable(expected))
    assert words.eos_id not in ids


def test_the_strings_are_many_kinds_and_always_the_same():
    texts = list(adversarial.strings(3000))
    assert texts == list(adversarial.strings(3000))
    assert len(set(texts)) > 2800
    assert all(text.encode() is not None for text in texts)
    for piece in ("<|endoftext|>", "\r\n", "\x85", "\u0301", "٣", "\U00020000", "'ll"):
        assert sum(piece in text for text in texts) > 10


def test_the_fastest_that_is_installed_is_taken(gpt2, monkeypatch):
    pytest.importorskip("fastokens")
    assert encoder(gpt2).name.startswith("fastokens ")
    assert Encoder(gpt2, ("tokenizers",)).name == "tokenizers"

    def missing(name):
        raise backends.PackageNotFoundError(name)

    monkeypatch.setattr(backends, "version", missing)
    assert Encoder(gpt2).name == "tokenizers"
    with pytest.raises(DataError, match="no backend 'quick': use fastokens, gigatoken"):
        Encoder(gpt2, ("quick",))


def wrong_for(text):
    """A maker of an encoder that is wrong for texts with `text` in them."""

    def make(words: TextTokenizer):
        right = backends._by_tokenizers(words)

        def encode(texts):
            ids, lengths = right(texts)
            if any(text in one for one in texts):
                ids = ids.copy()
                ids[-1] ^= 1
            return ids, lengths

        return encode

    return make


def test_one_that_is_wrong_is_not_used(gpt2, monkeypatch, caplog):
    monkeypatch.setitem(backends._MAKERS, "fastokens", wrong_for("\u0301"))
    monkeypatch.setitem(backends._MAKERS, "gigatoken", wrong_for("never seen before"))
    encode = Encoder(gpt2)
    assert encode.name.startswith("gigatoken")
    assert "fastokens" in caplog.text and "for odd text: not used" in caplog.text
    encode.certify(["plain text"] * 3)
    assert encode.name.startswith("gigatoken")
    encode.certify(["plain", "a text never seen before"])
    assert encode.name == "tokenizers"
    assert "gives other ids than tokenizers for this text: not used" in caplog.text
    np.testing.assert_array_equal(
        encode(["never seen before"])[0], gpt2.encode("never seen before")
    )


@pytest.mark.parametrize("settings", ["single_word", "lstrip", "rstrip", "normalized"])
def test_one_that_is_wrong_for_a_token_of_the_tokenizer_is_not_used(
    gpt2, monkeypatch, caplog, settings
):
    document = json.loads(gpt2.json_text)
    token = {"id": 50257, "content": "zebra", "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": False}  # fmt: skip
    document["added_tokens"].append(token | {settings: True})
    words = TextTokenizer("own", json.dumps(document), gpt2.eos_token)
    texts = list(adversarial.around(["zebra"]))
    expected = words.encode_batch(texts)
    assert 50257 in expected[0] and any("zebra" in text for text in texts)
    for name in FAST:  # right or not used
        assert Encoder(words, (name,))(texts)[0].tolist() == [i for one in expected for i in one]
    monkeypatch.setitem(backends._MAKERS, "fastokens", wrong_for("zebra"))
    assert Encoder(gpt2, ("fastokens",)).name.startswith("fastokens")
    assert Encoder(words, ("fastokens",)).name == "tokenizers"
    assert "gives other ids than tokenizers for odd text" in caplog.text


def test_one_that_fails_or_cannot_read_the_tokenizer_is_not_used(gpt2, monkeypatch, caplog):
    def cannot(words):
        raise ValueError("model type of another kind")

    def fails(words):
        def encode(texts):
            raise RuntimeError("too odd")

        return encode

    monkeypatch.setitem(backends._MAKERS, "fastokens", cannot)
    monkeypatch.setitem(backends._MAKERS, "gigatoken", fails)
    assert Encoder(gpt2).name == "tokenizers"
    assert "cannot read this tokenizer (model type" in caplog.text
    assert "failed on odd text (too odd)" in caplog.text


def test_truncation_of_a_file_is_off(tmp_path, gpt2):
    document = json.loads(gpt2.json_text)
    document["truncation"] = {"direction": "Right", "max_length": 2,
                              "strategy": "LongestFirst", "stride": 0}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    text = " ".join(random.Random(0).choices(["one", "two", "three"], k=50))
    ids, _ = Encoder(load(str(tmp_path)))([text])
    assert ids.tolist() == gpt2.encode(text)
