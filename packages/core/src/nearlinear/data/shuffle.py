"""A shuffle of any size that needs no memory: a keyed bijection on [0, n).

A Feistel network over the grid a x b, the smallest near-square grid with a * b >= n; values that
land beyond n walk the network again until they land inside (cycle walking). Source: Black and
Rogaway, "Ciphers with Arbitrary Finite Domains" (2002). Good mixing, not cryptography.
"""

import math

import numpy as np

_ROUNDS = 6
_MASK = 2**64 - 1
_MAX_N = 2**48


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Where a shuffle of `n` items puts each index: int64 in [0, n), same shape as `index`.

    `index` int64 in [0, n); distinct indices give distinct results. `key` is any integer (its low
    64 bits count). The result is the same on every platform and numpy version: only 64-bit
    integer arithmetic is used. Raises `ValueError` for an index outside [0, n).
    """
    index = np.asarray(index, dtype=np.int64)
    if not 1 <= n <= _MAX_N:
        raise ValueError(f"n is {n}: permute shuffles 1 to 2**48 items")
    if index.size and not 0 <= int(index.min()) <= int(index.max()) < n:
        raise ValueError(f"indices {index.min()}..{index.max()} are not all within [0, {n})")
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    round_keys = _round_keys(key)
    value = _feistel(index.reshape(-1).astype(np.uint64), a, b, round_keys)
    outside = np.flatnonzero(value >= n)
    while outside.size:
        value[outside] = _feistel(value[outside], a, b, round_keys)
        outside = outside[value[outside] >= n]
    return value.astype(np.int64).reshape(index.shape)


def _feistel(value: np.ndarray, a: int, b: int, round_keys: list[np.uint64]) -> np.ndarray:
    left, right = value // np.uint64(b), value % np.uint64(b)  # in [0, a) and [0, b)
    for number, round_key in enumerate(round_keys):
        if number % 2:
            right = (right + _mix(left, round_key) % np.uint64(b)) % np.uint64(b)
        else:
            left = (left + _mix(right, round_key) % np.uint64(a)) % np.uint64(a)
    return left * np.uint64(b) + right


def _mix(value: np.ndarray, round_key: np.uint64) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) of value xor key; wraps modulo 2**64."""
    z = value ^ round_key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _round_keys(key: int) -> list[np.uint64]:
    """SplitMix64's stream from `key`, in Python integers."""
    keys = []
    for number in range(1, _ROUNDS + 1):
        z = (key + number * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        keys.append(np.uint64(z ^ (z >> 31)))
    return keys
