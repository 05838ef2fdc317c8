"""Loops over the words of a document, compiled by numba on first use and cached.

A document is an array of code points. A chunk is a run of them without whitespace, and is looked up
by its hash in an open-addressing table, whose size is a power of two.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

SPACES = np.array([chr(code).isspace() for code in range(0x3001)])
"""Whether a code point is whitespace; none above is."""

EMPTY = np.uint64(0)
"""Key of an unused place of a table."""

NOT_SYMBOL, ALPHABETIC, PUNCTUATION, ENDS_SENTENCE = 1, 2, 4, 8
"""Flags of a word."""

HASH_START, HASH_FACTOR = np.uint64(0xCBF29CE484222325), np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
BASE = np.uint64(0x2545F4914F6CDD1D)
"""Base of the polynomial hash of a word, whose product forms the hash of joined words."""


def compiled(function: Callable) -> Any:
    """Compile a function, and keep the result on disk where a folder can be written."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)


@compiled
def _mixed(value):
    """Return SplitMix64's output step of a uint64, never `EMPTY`."""
    value = (value ^ (value >> np.uint64(30))) * _MIX[0]
    value = (value ^ (value >> np.uint64(27))) * _MIX[1]
    return (value ^ (value >> np.uint64(31))) | np.uint64(1)


@compiled
def split_chunks(codes, spaces, begins, ends, gaps, hashes):
    """Find the chunks of a document, and return their number.

    Args:
        codes: Code points, uint32 [characters].
        spaces: `SPACES`.
        begins, ends: Receive the extent of each chunk, int64 [characters].
        gaps: Receives the kind of whitespace before a chunk: 0 for a single space or none, 1 for
            other whitespace, 2 if it contains a line feed; uint8 [characters].
        hashes: Receives the hash of each chunk, uint64 [characters].
    """
    count, at, length = 0, 0, len(codes)
    while at < length:
        gap_begin, gap = at, 0
        while at < length and codes[at] < len(spaces) and spaces[codes[at]]:
            if codes[at] == 10:
                gap = 2
            at += 1
        if at == length:
            break
        if gap == 0 and (at - gap_begin > 1 or (at > gap_begin and codes[gap_begin] != 32)):
            gap = 1
        begins[count], gaps[count] = at, gap
        key = HASH_START
        while at < length and not (codes[at] < len(spaces) and spaces[codes[at]]):
            key = (key ^ np.uint64(codes[at])) * HASH_FACTOR
            at += 1
        ends[count], hashes[count] = at, _mixed(key)
        count += 1
    return count


@compiled
def _place_of(key, keys):
    """Return the place of a key in a table, or the unused one that it would take."""
    mask = np.uint64(len(keys) - 1)
    place = key & mask
    while keys[place] != EMPTY and keys[place] != key:
        place = (place + np.uint64(1)) & mask
    return place


@compiled
def look_up(hashes, keys, numbers, found):
    """Look up chunks, and return how many of them the table lacks.

    Args:
        hashes: Hash of each chunk, uint64 [chunks].
        keys: Hashes of the table's chunks, or `EMPTY`, uint64 [places].
        numbers: Number of each chunk of the table, int32 [places].
        found: Receives the number of each chunk, -1 if the table lacks it, int32 [chunks].
    """
    unknown = 0
    for at in range(len(hashes)):
        place = _place_of(hashes[at], keys)
        found[at] = numbers[place] if keys[place] != EMPTY else -1
        unknown += found[at] < 0
    return unknown


@compiled
def insert(hashes, new_numbers, keys, numbers):
    """Insert chunks that the table lacks.

    Args:
        hashes, keys, numbers: As of `look_up`.
        new_numbers: Number of each chunk, int32 [chunks].
    """
    for at in range(len(hashes)):
        place = _place_of(hashes[at], keys)
        keys[place], numbers[place] = hashes[at], new_numbers[at]


@compiled
def n_gram_keys(hashes, n):
    """Return the key of each n-gram of a text, uint64 [words - n + 1]; equal ones have equal keys.

    Args:
        hashes: Polynomial hash of each word of the text, uint64 [words].
        n: Words of an n-gram.
    """
    count = max(0, len(hashes) - n + 1)
    keys = np.empty(count, np.uint64)
    key, power = np.uint64(0), np.uint64(1)
    for _ in range(n):
        power *= BASE
    for at in range(len(hashes)):
        key = key * BASE + _mixed(hashes[at])
        if at >= n:
            key -= power * _mixed(hashes[at - n])
        if at >= n - 1:
            keys[at - n + 1] = _mixed(key)
    return keys


@compiled
def first_known(hashes, keys, numbers):
    """Return the number of the first of ``hashes`` that a table has, or -1; as of `look_up`."""
    for at in range(len(hashes)):
        place = _place_of(hashes[at], keys)
        if keys[place] != EMPTY:
            return numbers[place]
    return -1


@compiled
def words_of_chunks(chunks, firsts, words_of_all, words):
    """Write the words of chunks, in order; return their number.

    Args:
        chunks: Numbers of the chunks, int32 [chunks].
        firsts: First entry of each chunk's words; the next one is the end, int64 [known + 1].
        words_of_all: Words of all known chunks, int32 [entries].
        words: Receives the words, int32 [at least as many].
    """
    count = 0
    for chunk in chunks:
        for entry in range(firsts[chunk], firsts[chunk + 1]):
            words[count] = words_of_all[entry]
            count += 1
    return count


@compiled
def word_counts(chunks, firsts):
    """Return the number of words of chunks."""
    count = 0
    for chunk in chunks:
        count += firsts[chunk + 1] - firsts[chunk]
    return count


@compiled
def describe_words(codes, lengths, kinds, hashes, powers, flags):
    """Compute the properties of words.

    Args:
        codes: Code points of all words, one after the other, uint32 [characters].
        lengths: Characters of each word, int32 [words].
        kinds: Flags of each code point, uint8 [characters].
        hashes, powers: Receive the polynomial hash, and `BASE` to the power of the length; uint64
            [words].
        flags: Receives the flags of each word, uint8 [words].
    """
    at = 0
    for word in range(len(lengths)):
        some, every = np.uint8(0), np.uint8(255)
        hashes[word], powers[word] = 0, 1
        for code in codes[at : at + lengths[word]]:
            hashes[word] = hashes[word] * BASE + np.uint64(code) + np.uint64(1)
            powers[word] *= BASE
            some, every = some | kinds[code], every & kinds[code]
        flags[word] = (some & (NOT_SYMBOL | ALPHABETIC)) | (every & PUNCTUATION)
        if lengths[word] == 1:
            flags[word] |= every & ENDS_SENTENCE
        at += lengths[word]


@compiled
def count_kinds(words, lengths, flags, stop_words):
    """Count the words of Gopher's quality rules.

    Returns:
        Words that are not only symbols, the sum of their lengths, words with a letter, and the
        stop words that occur, a bit each.
    """
    not_symbols, characters, alphabetic, stops = 0, 0, 0, 0
    for word in words:
        kind = flags[word]
        if kind & NOT_SYMBOL:
            not_symbols += 1
            characters += lengths[word]
        if kind & ALPHABETIC:
            alphabetic += 1
        stops |= stop_words[word]
    return not_symbols, characters, alphabetic, stops


@compiled
def count_sentences(chunks, gaps, firsts, words_of_all, flags):
    """Count sentences of lines as spaCy's sentencizer finds them in each line by itself.

    A sentence ends after words that end sentences and the punctuation that follows them.
    Whitespace other than a single space is a token: it begins a sentence, too.

    Args:
        chunks: Chunks of lines joined by line feeds, int32 [chunks].
        gaps: Whitespace before each chunk, as of `split_chunks`, uint8 [chunks].
        firsts, words_of_all: As of `words_of_chunks`.
        flags: Flags of each word, uint8 [words].
    """
    sentences, ended = 0, False
    for at in range(len(chunks)):
        if at == 0 or gaps[at] == 2:
            sentences, ended = sentences + 1, False
        elif gaps[at] == 1 and ended:
            sentences, ended = sentences + 1, False
        for entry in range(firsts[chunks[at]], firsts[chunks[at] + 1]):
            kind = flags[words_of_all[entry]]
            if ended and not kind & (PUNCTUATION | ENDS_SENTENCE):
                sentences, ended = sentences + 1, False
            elif kind & ENDS_SENTENCE:
                ended = True
    return sentences


@compiled
def _shift(places):
    """Return the bits of a uint64 beyond those that number the places of a table."""
    bits = 0
    while 1 << bits < places:
        bits += 1
    return np.uint64(64 - bits)


@compiled
def frequent_n_gram(words, lengths, total, limits, keys, counts):
    """Return the first n whose most frequent n-gram fills too much of a text, or 0.

    The occurrences of an n-gram fill their characters with a space between words. Of equally
    frequent n-grams, the first one counts.

    Args:
        words: Words of the text, int32 [words].
        lengths: Characters of each word, int32 [known words].
        total: Characters of the text.
        limits: Largest share of the characters for each n, from 2; float64 [sizes].
        keys, counts: Scratch table, of a power of two of at least twice as many places as words;
            uint64 and int32 [places].
    """
    mask, shift = np.uint64(len(keys) - 1), _shift(len(keys))
    grams = words.astype(np.uint64)  # hashes of the (n - 1)-grams at each word, then of the n-grams
    for n in range(2, 2 + len(limits)):
        keys[:] = EMPTY
        best, best_at = 0, 0
        for at in range(len(words) - n + 1):
            key = (grams[at] + np.uint64(words[at + n - 1]) * BASE) * HASH_FACTOR | np.uint64(1)
            grams[at] = key ^ (key >> np.uint64(32))
            place = key >> shift
            while keys[place] != EMPTY and keys[place] != key:
                place = (place + np.uint64(1)) & mask
            counts[place] = 1 if keys[place] == EMPTY else counts[place] + 1
            keys[place] = key
            best = max(best, counts[place])
        for at in range(len(words) - n + 1):
            key = grams[at] ^ (grams[at] >> np.uint64(32))  # undoes the last step above
            place = key >> shift
            while keys[place] != key:
                place = (place + np.uint64(1)) & mask
            if counts[place] == best:
                best_at = at
                break
        characters = n - 1
        for word in words[best_at : best_at + n]:
            characters += lengths[word]
        if len(words) >= n and characters * best / total > limits[n - 2]:
            return n
    return 0


@compiled
def repeated_n_grams(words, lengths, total, hashes, powers, first, limits, keys):
    """Return the first n whose repeated n-grams fill too much of a text, or 0.

    An n-gram is repeated if its words, joined without spaces, equal those of an n-gram before. The
    search goes on behind a repeated n-gram.

    Args:
        words, lengths, total, keys: As of `frequent_n_gram`.
        hashes, powers: Polynomial hash of each word, and `BASE` to the power of its length; uint64
            [known words].
        first: The smallest n.
        limits: Largest share of the characters for each n, from the first; float64 [sizes].
    """
    mask, shift = np.uint64(len(keys) - 1), _shift(len(keys))
    count = len(words)
    word_hashes, word_powers = np.empty(count, np.uint64), np.empty(count, np.uint64)
    ends = np.empty(count + 1, np.int64)
    ends[0] = 0
    for at in range(count):
        word = words[at]
        word_hashes[at], word_powers[at] = hashes[word], powers[word]
        ends[at + 1] = ends[at] + lengths[word]
    joined = np.zeros(count, np.uint64)  # hashes of the joined (n - 1)-grams at each word
    for n in range(1, first):
        for at in range(count - n + 1):
            joined[at] = joined[at] * word_powers[at + n - 1] + word_hashes[at + n - 1]
    for size in range(len(limits)):
        n = first + size
        for at in range(count - n + 1):
            joined[at] = joined[at] * word_powers[at + n - 1] + word_hashes[at + n - 1]
        keys[:] = EMPTY
        repeated, at = 0, 0
        while at < count - n + 1:
            characters = ends[at + n] - ends[at]
            key = (joined[at] + np.uint64(characters)) * HASH_FACTOR | np.uint64(1)
            place = key >> shift
            while keys[place] != EMPTY and keys[place] != key:
                place = (place + np.uint64(1)) & mask
            if keys[place] == key:
                repeated += characters
                at += n
            else:
                keys[place] = key
                at += 1
        if repeated / total > limits[size]:
            return n
    return 0
