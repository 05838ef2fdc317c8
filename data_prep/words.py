"""Words of English text as spaCy's tokenizer finds them, at the speed of a table lookup.

spaCy splits text at whitespace first, and the words of such a chunk do not depend on its
surroundings. Therefore each distinct chunk is split once, and looked up afterwards: by a pattern if
its form is ordinary, else by spaCy.
"""

import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple
from unicodedata import category

import numpy as np

from data_prep import word_loops as loops

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
"""Of which Gopher's quality rules demand two."""
_STOP_BITS = {word: 1 << number for number, word in enumerate(STOP_WORDS)}

MOST_CHUNKS = 1 << 20
"""Distinct chunks that are kept; after that, the table begins anew."""

_SIMPLE = re.compile(
    r"""(["“(]?)(?:([A-Za-z]+)((?:-[A-Za-z]+)*)(['’]s)?|([0-9]+))([,;:?!"”)]|(?<=[a-z0-9])\.)?"""
)
"""Ordinary chunks: a mark, letters with hyphens or digits, a possessive, a mark."""
_HYPHEN = re.compile("(-)")
_LETTERS_END = 0x40000
"""First of the planes of Unicode that have neither letters nor punctuation."""


class Chunks(NamedTuple):
    """Chunks of a text, all of which are in a `WordTable`."""

    numbers: np.ndarray
    """Their numbers in the table, int32 [chunks]."""
    gaps: np.ndarray
    """Whitespace before each chunk, as of `word_loops.split_chunks`, uint8 [chunks]."""


class WordTable:
    """Words of all chunks seen so far, with the properties that quality rules ask for."""

    def __init__(self, symbols: frozenset[str], change: Callable[[str], str] | None = None):
        """Create an empty table.

        Args:
            symbols: Characters that make no word of their own.
            change: Applied to each chunk before it is split, which may add spaces.
        """
        import spacy

        pipeline = spacy.blank("en")
        self._split = pipeline.tokenizer
        self._rules, self._change = self._split.rules.keys(), change
        sentence_ends = frozenset(pipeline.add_pipe("sentencizer").punct_chars)
        self._kinds = _kinds_of_characters(symbols, sentence_ends)
        self._capacity = 0
        self.clear()

    def clear(self) -> None:
        """Forget all chunks."""
        self._make_table(1 << 14)
        self._numbers: dict[str, int] = {}  # of words
        self._new: list[str] = []
        self._chunks = 0
        self._firsts, self._entries = _Column(np.int64), _Column(np.int32)
        self._firsts.extend([0])
        self._lengths, self._flags = _Column(np.int32), _Column(np.uint8)
        self._hashes, self._powers = _Column(np.uint64), _Column(np.uint64)
        self._stops = _Column(np.int64)

    def _make_table(self, places: int) -> None:
        self._keys, self._values = np.zeros(places, np.uint64), np.zeros(places, np.int32)

    def limit(self) -> None:
        """Forget all chunks, and with them the numbers of words, if there are too many."""
        if self._chunks > MOST_CHUNKS:
            self.clear()

    def find(self, text: str) -> Chunks:
        """Split a text; spaCy splits its unknown chunks."""
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        self._reserve(len(codes) // 2 + 2)
        scratch = (self._begins, self._ends, self._gaps, self._hashed)
        count = loops.split_chunks(codes, loops.SPACES, *scratch)
        hashes, found = self._hashed[:count], np.empty(count, np.int32)
        if loops.look_up(hashes, self._keys, self._values, found):
            self._learn(text, np.flatnonzero(found < 0))
            loops.look_up(hashes, self._keys, self._values, found)
        return Chunks(found, self._gaps[:count].copy())

    def count(self, found: Chunks) -> int:
        """Return the number of words."""
        return loops.word_counts(found.numbers, self._firsts.values)

    def numbers(self, found: Chunks) -> np.ndarray:
        """Return the number of each word, int32 [words]."""
        words = np.empty(self.count(found), np.int32)
        loops.words_of_chunks(found.numbers, self._firsts.values, self._entries.values, words)
        return words

    def count_sentences(self, found: Chunks) -> int:
        """Return the sentences of lines that were joined by line feeds."""
        columns = (self._firsts.values, self._entries.values, self._flags.values)
        return loops.count_sentences(found.numbers, found.gaps, *columns)

    def count_kinds(self, words: np.ndarray) -> tuple[int, int, int, int]:
        """Return the counts of `word_loops.count_kinds`."""
        columns = (self._lengths.values, self._flags.values, self._stops.values)
        return loops.count_kinds(words, *columns)

    @property
    def lengths(self) -> np.ndarray:
        """Characters of each word, int32 [words]."""
        return self._lengths.values

    @property
    def joined_hashes(self) -> tuple[np.ndarray, np.ndarray]:
        """Hash and power of each word, as of `word_loops.repeated_n_grams`."""
        return self._hashes.values, self._powers.values

    def _reserve(self, chunks: int) -> None:
        if chunks > self._capacity:
            self._capacity = 2 * chunks
            self._begins, self._ends = (np.empty(self._capacity, np.int64) for _ in range(2))
            self._gaps = np.empty(self._capacity, np.uint8)
            self._hashed = np.empty(self._capacity, np.uint64)

    def _learn(self, text: str, where: np.ndarray) -> None:
        """Add chunks of a text to the table.

        Args:
            text: The text.
            where: Places of the chunks among those of the text, int64 [chunks].
        """
        begins, ends = self._begins[where].tolist(), self._ends[where].tolist()
        extents = zip(begins, ends, where.tolist(), strict=True)
        new = {text[begin:end]: place for begin, end, place in extents}
        while 2 * (self._chunks + len(new)) > len(self._keys):
            used = self._keys != loops.EMPTY
            old = self._keys[used], self._values[used]
            self._make_table(4 * len(self._keys))
            loops.insert(*old, self._keys, self._values)
        entries, firsts = [], []
        for chunk in new:
            for part in self._change(chunk).split() if self._change else (chunk,):
                entries += self._simple_words(part) or self._words(part)
            firsts.append(len(self._entries) + len(entries))
        self._describe()
        self._entries.extend(entries)
        self._firsts.extend(firsts)
        numbers = np.arange(self._chunks, self._chunks + len(new), dtype=np.int32)
        loops.insert(self._hashed[[*new.values()]], numbers, self._keys, self._values)
        self._chunks += len(new)

    def _simple_words(self, chunk: str) -> list[int]:
        """Split a chunk of an ordinary form as spaCy does; return no words for another one."""
        if chunk.isascii() and chunk.isalpha():
            return [] if chunk in self._rules else [self._number(chunk)]
        found = _SIMPLE.fullmatch(chunk)
        if found is None:
            return []
        before, core, more, possessive, digits, after = found.groups("")
        core += digits
        last = more.rpartition("-")[2] or core
        if not self._rules.isdisjoint((chunk, core, core + more, before + core, last + after)):
            return []
        words = [before, core, *_HYPHEN.split(more)[1:], possessive, after]
        return [self._number(word) for word in words if word]

    def _words(self, chunk: str) -> list[int]:
        """Let spaCy split a chunk."""
        found = [token.text for token in self._split(chunk)]
        if "IS_ALPHA" in found:  # spaCy's name of an attribute: datatrove leaves it out
            found = [token.text for token in self._split(chunk.replace("IS_ALPHA", ""))]
        return [self._number(word) for each in found if (word := each.strip())]

    def _number(self, word: str) -> int:
        """Return the number of a word, which `_describe` describes if it is new."""
        number = self._numbers.get(word)
        if number is None:
            number = self._numbers[word] = len(self._numbers)
            self._new.append(word)
        return number

    def _describe(self) -> None:
        """Store the properties of the words that are new since the last call."""
        new, self._new = self._new, []
        lengths = np.fromiter(map(len, new), np.int32, len(new))
        codes = np.frombuffer("".join(new).encode("utf-32-le", "surrogatepass"), np.uint32)
        hashes, powers = (np.empty(len(new), np.uint64) for _ in range(2))
        flags = np.empty(len(new), np.uint8)
        loops.describe_words(codes, lengths, self._kinds, hashes, powers, flags)
        self._lengths.extend(lengths)
        self._hashes.extend(hashes)
        self._powers.extend(powers)
        self._flags.extend(flags)
        self._stops.extend([_STOP_BITS.get(word, 0) for word in new])


@cache
def _kinds_of_characters(symbols: frozenset[str], sentence_ends: frozenset[str]) -> np.ndarray:
    """Return flags of each code point, as of words of this one character: uint8 [characters]."""
    kinds = np.full(sys.maxunicode + 1, loops.NOT_SYMBOL, np.uint8)
    kinds[[*map(ord, symbols)]] = 0
    kinds[[*map(ord, sentence_ends)]] |= loops.ENDS_SENTENCE
    for code, symbol in enumerate(map(chr, range(_LETTERS_END))):
        if symbol.isalpha():
            kinds[code] |= loops.ALPHABETIC
        elif category(symbol)[0] == "P":
            kinds[code] |= loops.PUNCTUATION
    return kinds


class _Column:
    """A growing array."""

    def __init__(self, dtype: type):
        self._array, self._size = np.empty(1 << 12, dtype), 0

    def extend(self, values: Sequence[int] | np.ndarray) -> None:
        end = self._size + len(values)
        while end > len(self._array):
            self._array = np.concatenate([self._array, np.empty_like(self._array)])
        self._array[self._size : end] = values
        self._size = end

    def __len__(self) -> int:
        return self._size

    @property
    def values(self) -> np.ndarray:
        return self._array[: self._size]
