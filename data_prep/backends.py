"""Who turns text into ids: the fastest encoder that is installed and proves to be right.

`tokenizers` is the reference: what it says is right. A faster one is used once it gave the same
ids for 600 adversarial strings and for text with the tokenizer's own tokens, and gives them for the
first documents of every split; if it does not, the next one is taken, and that is said. So ids
never depend on which was used.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from data_prep import pieces
from data_prep.adversarial import around, strings
from data_prep.tokenizer import TextTokenizer
from nearlinear.errors import DataError

logger = logging.getLogger("data_prep")

BACKENDS = ("fastokens", "gigatoken", "tokenizers")
CERTIFYING_STRINGS = 600
_SAMPLE_CHARACTERS = 4 * 1024

Encoded = tuple[np.ndarray, np.ndarray]
"""token ids of all documents, uint32 [tokens]; tokens of each document, int64 [documents]"""


@lru_cache(maxsize=4)
def encoder(words: TextTokenizer, names: tuple[str, ...] = BACKENDS) -> "Encoder":
    """An `Encoder`, made once in a process: making one takes longer than a small dataset."""
    return Encoder(words, names)


class Encoder:
    """Encodes batches of documents by one backend, which it checks as it goes.

    `names` are the backends to try in turn. Raises `DataError` for a name that is not known.
    """

    def __init__(self, words: TextTokenizer, names: Sequence[str] = BACKENDS):
        unknown = set(names) - set(BACKENDS)
        if unknown:
            raise DataError(f"no backend {sorted(unknown)[0]!r}: use {', '.join(BACKENDS)}")
        self.words, self._left = words, [*names, "tokenizers"]
        self._reference = lambda texts: _by_tokenizers(words)(texts)
        self._next()

    def __call__(self, texts: list[str]) -> Encoded:
        """The ids of `texts`, without EOS."""
        if max(map(len, texts), default=0) <= pieces.PIECE:
            return self._encode(texts)
        found = [list(self._by_pieces(text)) for text in texts]
        lengths = [sum(map(len, ids)) for ids in found]
        return np.concatenate([ids for each in found for ids in each]), np.array(lengths)

    def _by_pieces(self, text: str) -> Iterator[np.ndarray]:
        """The ids of a document, a piece at a time if it is long."""
        for piece in pieces.pieces(text) if len(text) > pieces.PIECE and self._can_cut else [text]:
            pieces.tell_if_long(len(piece))
            yield self._encode([piece])[0]

    @cached_property
    def _can_cut(self) -> bool:
        return pieces.can_cut(self.words)

    def certify(self, texts: Sequence[str]) -> None:
        """Compare with the reference on the first of `texts`; take the next backend if they differ.

        It is called with the first documents of every split.
        """
        sample, size = [], 0
        for text in texts:
            if size >= _SAMPLE_CHARACTERS:
                break
            sample.append(text[: _SAMPLE_CHARACTERS - size])
            size += len(sample[-1])
        while self.name != "tokenizers" and not self._agrees(sample):
            logger.warning("%s gives other ids than tokenizers for this text: not used", self.name)
            self._next()

    def _next(self) -> None:
        """Take the next backend that is installed, can read the tokenizer, and is right."""
        while True:
            name = self._left.pop(0)
            try:
                self.name = name if name == "tokenizers" else f"{name} {version(name)}"
                self._encode = _MAKERS[name](self.words)
            except PackageNotFoundError:
                continue
            except Exception as error:  # each library raises kinds of its own
                logger.warning("%s cannot read this tokenizer (%s): not used", self.name, error)
                continue
            own = around(token.content for token in self.words.added)
            if name == "tokenizers" or self._agrees([*_adversarial(), *own]):
                return
            logger.warning("%s gives other ids than tokenizers for odd text: not used", self.name)

    def _agrees(self, texts: Sequence[str]) -> bool:
        try:
            found = self._encode(list(texts))
        except Exception as error:  # it may refuse what it cannot do
            logger.warning("%s failed on odd text (%s)", self.name, error)
            return False
        return all(map(np.array_equal, found, self._reference(list(texts))))


@cache
def _adversarial() -> tuple[str, ...]:
    return tuple(strings(CERTIFYING_STRINGS))


def _by_fastokens(words: TextTokenizer) -> Callable[[list[str]], Encoded]:
    """By one thread, unless told otherwise: workers have a core each, and two take a quarter more
    CPU seconds."""
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")  # read once, when it is first needed
    import fastokens

    tokenizer = fastokens.Tokenizer.from_json_str(_plain(words.json_text))

    def encode(texts: list[str]) -> Encoded:
        ids, offsets = tokenizer.encode_batch_flat(texts, split_special_tokens=True)
        return np.frombuffer(ids, "<u4"), np.diff(np.frombuffer(offsets, "<u8").astype(np.int64))

    return encode


def _by_gigatoken(words: TextTokenizer) -> Callable[[list[str]], Encoded]:
    import awkward
    import gigatoken

    document = json.loads(words.json_text)
    document["added_tokens"] = [t for t in document["added_tokens"] if not t["special"]]
    tokenizer = gigatoken.Tokenizer.from_json(json.dumps(document))

    def encode(texts: list[str]) -> Encoded:
        found = tokenizer.encode_batch(texts, parallel=False)
        lengths = awkward.to_numpy(awkward.num(found)).astype(np.int64)
        return awkward.to_numpy(awkward.flatten(found)).astype(np.uint32), lengths

    return encode


def _by_tokenizers(words: TextTokenizer) -> Callable[[list[str]], Encoded]:
    def encode(texts: list[str]) -> Encoded:
        found = words.encode_batch(texts)
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        ids = np.fromiter((i for ids in found for i in ids), np.uint32, int(lengths.sum()))
        return ids, lengths

    return encode


def _plain(json_text: str) -> str:
    """A tokenizer.json without truncation and padding."""
    if '"truncation": null' in json_text[:200] and '"padding": null' in json_text[:200]:
        return json_text
    return json.dumps({**json.loads(json_text), "truncation": None, "padding": None})


_MAKERS = {"fastokens": _by_fastokens, "gigatoken": _by_gigatoken, "tokenizers": _by_tokenizers}
