"""Leave out documents that contain text of evaluation sets: those that share 12 words in a row.

Decisions equal those of datatrove's n-gram decontamination. Words are compared without case,
accents, punctuation and the values of numbers. Of a question with an answer, the words of the
answer count, alone or after the end of the question, but not the question alone, which often quotes
a public text.

Source: Brown et al. 2020 (GPT-3, appendix C), which compares 13 words.
"""

import hashlib
import io
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import regex

from data_prep import word_loops as loops
from data_prep.quality import PUNCTUATION, SYMBOLS, Judge
from data_prep.sources.files import decode_utf8, read_lines
from data_prep.words import WordTable
from nearlinear.errors import DataError

WORDS = 12
"""Words of an n-gram."""

_NUMBER = regex.compile(r"\d+(?:[.,\u060c\u066b\u2396-\u2398]\d+)?")
_ASCII_PUNCTUATION = "".join(filter(str.isascii, PUNCTUATION)).encode()
_ASCII_PUNCTUATION_AS_SPACE = bytes.maketrans(_ASCII_PUNCTUATION, b" " * len(_ASCII_PUNCTUATION))
_OTHER_PUNCTUATION_AS_SPACE = str.maketrans(
    {character: " " for character in PUNCTUATION if not character.isascii()}
)
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


@dataclass(frozen=True)
class EvaluationSets:
    """The n-grams of evaluation sets."""

    names: tuple[str, ...]
    """Names of the files, without their endings."""
    keys: np.ndarray
    """Distinct keys of n-grams, uint64 [n-grams]."""
    numbers: np.ndarray
    """The set of each, the first one that has it, int32 [n-grams]."""

    @property
    def settings(self) -> dict[str, Any]:
        """Names and digest of the sets, for the settings of a preparation."""
        digest = hashlib.sha256(self.keys.tobytes() + self.numbers.tobytes()).hexdigest()
        return {"names": [*self.names], "words": WORDS, "sha256": digest}

    @cached_property
    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and numbers as a table of `word_loops.first_known`."""
        places = 1 << (2 * len(self.keys)).bit_length()
        table = np.zeros(places, np.uint64), np.zeros(places, np.int32)
        loops.insert(self.keys, self.numbers, *table)
        return table

    def to_bytes(self) -> bytes:
        """Return the arrays as a file of numpy."""
        stream = io.BytesIO()
        np.savez(stream, keys=self.keys, numbers=self.numbers)
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, settings: dict[str, Any]) -> "EvaluationSets":
        """Return the sets of `to_bytes`. Raises `DataError` if ``settings`` are of others."""
        arrays = np.load(io.BytesIO(data), allow_pickle=False)
        found = cls(tuple(settings["names"]), arrays["keys"], arrays["numbers"])
        if found.settings != settings:
            raise DataError(
                "the evaluation sets of this preparation have changed: prepare with --overwrite"
            )
        return found


def read_evaluation_sets(paths: Sequence[str | Path]) -> EvaluationSets:
    """Read the n-grams of JSON lines, also compressed, of evaluation sets.

    A line has ``text``, or ``query`` and ``label``; a label may be a list of strings.

    Raises:
        DataError: A line has other fields, or a file too few words.
    """
    words = ComparedWords()
    names = [Path(path).name.partition(".")[0] for path in paths]
    if len({*names}) < len(names):
        raise DataError(f"evaluation sets need different names, and these are {', '.join(names)}")
    keys: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    for number, path in enumerate(paths):
        before = len(keys)
        for query, label in _read_items(path):
            question, answer = map(words.hashes, (query, label))
            border = np.concatenate([question[1 - WORDS :], answer[: WORDS - 1]])
            keys += [loops.n_gram_keys(part, WORDS) for part in (answer, border)]
        numbers.append(np.full(sum(map(len, keys[before:])), number, np.int32))
        if not len(numbers[-1]):
            raise DataError(f"{path} has no text of {WORDS} words, so that nothing would be found")
    distinct, first = np.unique(np.concatenate(keys), return_index=True)
    return EvaluationSets(tuple(names), distinct, np.concatenate(numbers)[first])


class Decontamination:
    """The rule that drops texts with n-grams of evaluation sets."""

    def __init__(self, sets: EvaluationSets):
        self._names, self._table, self._words = sets.names, sets.table, ComparedWords()

    def __call__(self, judge: Judge, text: str) -> tuple[str | None, str]:
        """Return the name of the set whose text a document contains, or None, and the text."""
        keys = loops.n_gram_keys(self._words.hashes(text), WORDS)
        number = loops.first_known(keys, *self._table)
        return None if number < 0 else self._names[number], text


class ComparedWords:
    """The words of texts as they are compared."""

    def __init__(self):
        self._table = WordTable(SYMBOLS, simplify)  # no step of it looks beyond whitespace

    def hashes(self, text: str) -> np.ndarray:
        """Return the hash of each word of a text, uint64 [words]."""
        self._table.limit()
        words = self._table.numbers(self._table.find(text))
        return self._table.joined_hashes[0][words]


def _read_items(path: str | Path) -> Iterator[tuple[str, str]]:
    """Yield question and answer of each item; a text is an answer without a question."""
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(decode_utf8(line, path))
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from None
        fields: dict[str, Any] = item if isinstance(item, dict) else {}
        query, given = fields.get("query", ""), fields.get("label", fields.get("text"))
        labels: list[Any] = given if isinstance(given, list) else [given]
        if not labels or not all(isinstance(text, str) for text in (query, *labels)):
            raise DataError(
                f"{path}, line {number}: an item of an evaluation set is an object with the string "
                "text, or with the strings query and label; a label may be a list of strings"
            )
        for label in labels:
            yield query, label


def simplify(text: str) -> str:
    """Return the words of a text as they are compared, with a space in between."""
    if text.isascii() and text.isalpha():
        return text.lower()
    text = _NUMBER.sub("0", text.lower())
    data = text.encode(errors="surrogatepass").translate(_ASCII_PUNCTUATION_AS_SPACE)
    text = data.decode(errors="surrogatepass")
    if text.isascii():
        return " ".join(text.split())
    text = _NOT_ASCII.sub(lambda found: found[0].translate(_OTHER_PUNCTUATION_AS_SPACE), text)
    return _NOT_ASCII.sub(_without_marks, " ".join(text.split())).strip()


def _without_marks(found: re.Match[str]) -> str:
    letters = unicodedata.normalize("NFD", found[0])
    return "".join(letter for letter in letters if unicodedata.category(letter) != "Mn")
