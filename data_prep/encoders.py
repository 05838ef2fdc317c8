"""Encode text by the fastest installed backend that gives the ids of the reference.

`tokenizers` is the reference. A faster backend is used after it gave the same ids for 600
adversarial strings and for text with the tokenizer's added tokens, and while it does for the first
documents of every split. Otherwise a warning is logged and the next backend is used, so ids never
depend on the backend.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from data_prep import text_chunks
from data_prep.tokenizer import TextTokenizer
from data_prep.tokenizer_checks import adversarial_strings, strings_with_tokens
from nearlinear.errors import DataError

logger = logging.getLogger("data_prep")

BACKENDS = ("fastokens", "gigatoken", "tokenizers")
ADVERSARIAL_STRINGS = 600
_SAMPLE_CHARACTERS = 4 * 1024

Encoded = tuple[np.ndarray, np.ndarray]
"""Token ids of all documents, uint32 [tokens], and tokens per document, int64 [documents]."""
Backend = Callable[[list[str]], Encoded]


@lru_cache(maxsize=4)
def get_encoder(tokenizer: TextTokenizer, names: tuple[str, ...] = BACKENDS) -> "Encoder":
    """Return a cached `Encoder`; creating one takes longer than encoding a small dataset."""
    return Encoder(tokenizer, names)


class Encoder:
    """Encodes batches of documents and compares its backend with the reference.

    Args:
        names: Backends to try, in order. Raises `DataError` for an unknown name.
    """

    def __init__(self, tokenizer: TextTokenizer, names: Sequence[str] = BACKENDS):
        unknown = set(names) - set(BACKENDS)
        if unknown:
            raise DataError(f"no backend {sorted(unknown)[0]!r}: use {', '.join(BACKENDS)}")
        if tokenizer.marks_targets:  # only the tokenizer itself knows the template
            names = ()
        self.tokenizer, self._candidates = tokenizer, [*names, "tokenizers"]
        self._select_next()

    def __call__(self, texts: list[str]) -> Encoded:
        """Encode texts, without EOS."""
        if max(map(len, texts), default=0) <= text_chunks.CHUNK_CHARACTERS:
            return self._encode(texts)
        found = [list(self._encode_chunks(text)) for text in texts]
        lengths = [sum(map(len, ids)) for ids in found]
        return np.concatenate([ids for each in found for ids in each]), np.array(lengths)

    def _encode_chunks(self, text: str) -> Iterator[np.ndarray]:
        """Yield the ids of a document, chunk by chunk if it is long."""
        is_long = len(text) > text_chunks.CHUNK_CHARACTERS
        for chunk in text_chunks.split_text(text) if is_long and self._can_split else [text]:
            text_chunks.warn_if_long(len(chunk))
            yield self._encode([chunk])[0]

    @cached_property
    def _can_split(self) -> bool:
        return not self.tokenizer.marks_targets and text_chunks.can_split(self.tokenizer)

    def verify_sample(self, texts: Sequence[str]) -> None:
        """Compare with the reference on the first texts of a split; switch backends on a mismatch.

        Called with the first documents of every input split.
        """
        sample, size = [], 0
        for text in texts:
            if size >= _SAMPLE_CHARACTERS:
                break
            sample.append(text[: _SAMPLE_CHARACTERS - size])
            size += len(sample[-1])
        while self.name != "tokenizers" and not self._matches_reference(sample):
            logger.warning(
                "not using %s: its ids differ from those of tokenizers for this text", self.name
            )
            self._select_next()

    def _select_next(self) -> None:
        """Switch to the next backend that is installed, reads the tokenizer, and is correct."""
        while True:
            name = self._candidates.pop(0)
            try:
                self.name = name if name == "tokenizers" else f"{name} {version(name)}"
                self._encode = _BACKEND_MAKERS[name](self.tokenizer)
            except PackageNotFoundError:
                continue
            except Exception as error:  # each library raises its own types
                logger.warning("not using %s: cannot read this tokenizer (%s)", self.name, error)
                continue
            added = strings_with_tokens(token.content for token in self.tokenizer.added_tokens)
            if name == "tokenizers" or self._matches_reference([*_test_strings(), *added]):
                return
            logger.warning(
                "not using %s: its ids differ from those of tokenizers for adversarial text",
                self.name,
            )

    def _matches_reference(self, texts: Sequence[str]) -> bool:
        try:
            found = self._encode(list(texts))
        except Exception as error:  # a backend may reject input that it does not support
            logger.warning("%s failed on adversarial text (%s)", self.name, error)
            return False
        expected = _tokenizers_backend(self.tokenizer)(list(texts))
        return all(map(np.array_equal, found, expected))


@cache
def _test_strings() -> tuple[str, ...]:
    return tuple(adversarial_strings(ADVERSARIAL_STRINGS))


def _fastokens_backend(tokenizer: TextTokenizer) -> Backend:
    # Workers have a core each, and two threads need a quarter more CPU seconds than one.
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")  # read once, at the first use
    import fastokens

    backend = fastokens.Tokenizer.from_json_str(_without_truncation(tokenizer.encoding_json))

    def encode(texts: list[str]) -> Encoded:
        ids, offsets = backend.encode_batch_flat(texts, split_special_tokens=True)
        return np.frombuffer(ids, "<u4"), np.diff(np.frombuffer(offsets, "<u8").astype(np.int64))

    return encode


def _gigatoken_backend(tokenizer: TextTokenizer) -> Backend:
    import awkward
    import gigatoken

    document = json.loads(tokenizer.encoding_json)
    document["added_tokens"] = [t for t in document["added_tokens"] if not t["special"]]
    backend = gigatoken.Tokenizer.from_json(json.dumps(document))

    def encode(texts: list[str]) -> Encoded:
        found = backend.encode_batch(texts, parallel=False)
        lengths = awkward.to_numpy(awkward.num(found)).astype(np.int64)
        return awkward.to_numpy(awkward.flatten(found)).astype(np.uint32), lengths

    return encode


def _tokenizers_backend(tokenizer: TextTokenizer) -> Backend:
    def encode(texts: list[str]) -> Encoded:
        found = tokenizer.encode_batch(texts)
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        ids = np.fromiter((i for ids in found for i in ids), np.uint32, int(lengths.sum()))
        return ids, lengths

    return encode


def _without_truncation(json_text: str) -> str:
    """Remove truncation and padding from a tokenizer.json."""
    if '"truncation": null' in json_text[:200] and '"padding": null' in json_text[:200]:
        return json_text
    return json.dumps({**json.loads(json_text), "truncation": None, "padding": None})


_BACKEND_MAKERS: dict[str, Callable[[TextTokenizer], Backend]] = {
    "fastokens": _fastokens_backend,
    "gigatoken": _gigatoken_backend,
    "tokenizers": _tokenizers_backend,
}
