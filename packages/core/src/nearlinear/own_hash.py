"""Hash of a document that stands in the document itself, where its digits count as zeros."""

from __future__ import annotations

import hashlib

NO_HASH = "0" * 64
"""Digits of a hash that is still to be inserted."""


def insert_hash(text: bytes) -> bytes:
    """Replace the first `NO_HASH` of a document with the SHA-256 of the document."""
    return text.replace(NO_HASH.encode(), hashlib.sha256(text).hexdigest().encode(), 1)


def is_intact(text: bytes, place: tuple[int, int]) -> bool:
    """Return True if the digits at ``place`` (begin, end) are those that `insert_hash` inserts."""
    begin, end = place
    digest = hashlib.sha256(text[:begin])
    digest.update(NO_HASH.encode())
    digest.update(memoryview(text)[end:])
    return digest.hexdigest().encode() == text[begin:end]
