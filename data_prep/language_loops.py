"""Loops of fastText's model of languages, compiled by numba on first use and cached.

Text is UTF-8. The words, their n-grams and the hashes of these are fastText's (Bojanowski et al.
2017): words end at ASCII whitespace and zero bytes, and have a mark at both ends.
"""

import numpy as np

from data_prep.word_loops import HASH_FACTOR, HASH_START, compiled, look_up

_PLACE_BITS = 17
PLACES = 1 << _PLACE_BITS
"""Places for words met before; a word replaces another one at its place."""

_BEGIN, _END = ord("<"), ord(">")
_END_OF_TEXT = np.frombuffer(b"</s>", np.uint8)  # the model's first word; text behind it is ignored
_LABEL = np.frombuffer(b"__label__", np.uint8)  # begins words that are ignored
_TAB, _CARRIAGE_RETURN, _SPACE = 9, 13, 32  # whitespace is also between the first two
_OFFSET, _PRIME = np.uint64(2166136261), np.uint64(16777619)
_LOW, _SIGN = np.uint64(0xFFFFFFFF), np.uint64(0xFFFFFF00)
_SMALL = 1e-5  # added to probabilities before their logarithm


@compiled
def _extended(key, byte):
    """Return the hash of bytes with one more."""
    key = (key ^ np.uint64(byte)) * HASH_FACTOR
    return key ^ (key >> np.uint64(32))


@compiled
def hash_of(word):
    """Return a hash of bytes, uint64, never 0."""
    key = HASH_START
    for byte in word:
        key = _extended(key, byte)
    return key | np.uint64(1)


@compiled
def _begins_with(word, start):
    if len(word) < len(start):
        return False
    for at in range(len(start)):
        if word[at] != start[at]:
            return False
    return True


@compiled
def _add_n_grams(word, rows, n_grams, shortest, longest, total):
    """Add the rows of a word's n-grams to a vector; return their number.

    Args:
        word: Bytes of the word with its marks, uint8 [bytes].
        rows, n_grams, shortest, longest: As of `LanguageModel`.
        total: The vector, float32 [width].
    """
    count, length, buckets = 0, len(word), np.uint64(len(n_grams))
    for begin in range(length):
        if word[begin] & 0xC0 == 0x80:  # within a character
            continue
        key, end = _OFFSET, begin
        for size in range(1, longest + 1):
            if end == length:
                break
            while True:
                byte = np.uint64(word[end])
                if byte >= 128:  # fastText hashes signed bytes
                    byte |= _SIGN
                key = ((key ^ byte) * _PRIME) & _LOW
                end += 1
                if end == length or word[end] & 0xC0 != 0x80:
                    break
            if size < shortest or (size == 1 and (begin == 0 or end == length)):
                continue
            row = n_grams[key % buckets]
            if row >= 0:
                count += 1
                for column in range(rows.shape[1]):
                    total[column] += rows[row, column]
    return count


@compiled
def add_words(
    data, rows, word_keys, word_rows, n_grams, shortest, longest, keys, counts, sums, total
):
    """Add the rows of all words of a text and of their n-grams; return the number of rows.

    Args:
        data: The text, uint8 [bytes].
        rows, n_grams, shortest, longest: As of `LanguageModel`.
        word_keys, word_rows: `LanguageModel.words`.
        keys, counts, sums: `LanguageModel.known`.
        total: Receives the sum, float64 [width].
    """
    found, at, length, marked = 0, 0, len(data), np.empty(64, np.uint8)
    end_of_text = hash_of(_END_OF_TEXT)
    hashed, row = np.empty(1, np.uint64), np.empty(1, np.int32)
    while at < length:
        begin, key = at, HASH_START
        while at < length:
            byte = data[at]
            if byte == _SPACE or byte == 0 or _TAB <= byte <= _CARRIAGE_RETURN:
                break
            key = _extended(key, byte)
            at += 1
        end, key = at, key | np.uint64(1)
        at += 1
        if begin == end:
            continue
        if data[begin] == _LABEL[0] and _begins_with(data[begin:end], _LABEL):
            continue
        if data[begin] == _BEGIN and key == end_of_text:
            break
        place = key >> np.uint64(64 - _PLACE_BITS)
        if keys[place] != key:
            word = data[begin:end]
            if len(word) + 2 > len(marked):
                marked = np.empty(2 * len(word) + 2, np.uint8)
            marked[0], marked[len(word) + 1] = _BEGIN, _END
            marked[1 : len(word) + 1] = word
            sums[place, :] = 0
            hashed[0] = key
            keys[place], counts[place] = key, 0
            if not look_up(hashed, word_keys, word_rows, row):
                sums[place, :] = rows[row[0]]
                counts[place] = 1
            counts[place] += _add_n_grams(
                marked[: len(word) + 2], rows, n_grams, shortest, longest, sums[place]
            )
        found += counts[place]
        for column in range(len(total)):
            total[column] += sums[place, column]
    for column in range(len(total)):  # the end of the text is a word, too
        total[column] += rows[0, column]
    return found + 1


@compiled
def scores_of_labels(hidden, nodes, children):
    """Return the probability of each label, float64 [labels].

    Args:
        hidden: Mean of the rows of a text, float64 [width].
        nodes, children: As of `LanguageModel`.
    """
    labels = len(nodes) + 1
    scores = np.zeros(2 * labels - 1)
    for at in range(len(nodes) - 1, -1, -1):
        product = 0.0
        for column in range(len(hidden)):
            product += nodes[at, column] * hidden[column]
        right = 1 / (1 + np.exp(-product))
        left_child, right_child = children[at]
        scores[left_child] = scores[labels + at] + np.log(1 - right + _SMALL)
        scores[right_child] = scores[labels + at] + np.log(right + _SMALL)
    return np.exp(scores[:labels])
