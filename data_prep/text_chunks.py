"""Split long documents into chunks whose concatenated ids equal those of the whole document.

Some pre-tokenizers provably end a word between an ASCII letter and a following space or newline:
no pattern before the cut looks past it, and none after it looks back. A model never sees more than
one word, so cutting there does not change the ids. For other pre-tokenizers, a document stays
whole.
"""

import json
import logging
import re
from collections.abc import Iterator
from string import ascii_letters
from typing import Any

from data_prep.tokenizer import TextTokenizer

logger = logging.getLogger("data_prep")

CHUNK_CHARACTERS = 1024 * 1024
"""Approximate size of a chunk. An encoder needs about ten times the chunk's bytes of memory."""
WARN_CHARACTERS = 16 * 1024 * 1024
"""Size of a chunk without a safe cut above which a warning is logged."""

_SAFE_CUT = re.compile(r"[A-Za-z](?=[ \n])")
_SAFE_PATTERNS = (
    # GPT-2
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # Llama 3 (cl100k) and Qwen 2, which differ in the digits of a word
    *(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + digits
      + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+" for digits in ("{1,3}", "")),
)  # fmt: skip
"""Word patterns of which no alternative continues from a letter to a space."""


def can_split(tokenizer: TextTokenizer) -> bool:
    """Return True if documents can be split for this tokenizer without changing their ids."""
    document = json.loads(tokenizer.json_text)
    added = [token for token in document.get("added_tokens", []) if not token["special"]]
    if document.get("normalizer") or any(map(_may_span_cut, added)):
        return False
    return _ends_words_at_cut(document.get("pre_tokenizer") or {})


def split_text(text: str) -> Iterator[str]:
    """Yield `text` in chunks of about `CHUNK_CHARACTERS`, cut only where it is safe."""
    start = 0
    while len(text) - start > CHUNK_CHARACTERS:
        end = _last_cut(text, start + 1, start + CHUNK_CHARACTERS)
        if end is None:
            found = _SAFE_CUT.search(text, start + CHUNK_CHARACTERS - 1)
            if found is None:
                break
            end = found.end()
        yield text[start:end]
        start = end
    yield text[start:]


def _last_cut(text: str, first: int, end: int) -> int | None:
    """Return the last safe cut in [first, end), or None."""
    for mark in " \n":
        at = end
        while (at := text.rfind(mark, first, at)) >= 0:
            if text[at - 1] in ascii_letters:
                return at
    return None


def warn_if_long(length: int) -> None:
    """Log a warning if a chunk of `length` characters needs much memory."""
    if length > WARN_CHARACTERS:
        logger.warning(
            "encoding %d characters at once, more than %d, because no safe cut was found: a "
            "worker needs about %.1f GiB; cut such documents first",
            length, WARN_CHARACTERS, 12 * length / 2**30,
        )  # fmt: skip


def _ends_words_at_cut(pre_tokenizer: dict[str, Any]) -> bool:
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        first, *rest = pre_tokenizer["pretokenizers"]
        return _ends_words_at_cut(first) and all(
            each["type"] == "ByteLevel" and not each["add_prefix_space"] for each in rest
        )
    if kind == "ByteLevel":
        return not pre_tokenizer["add_prefix_space"] and pre_tokenizer.get("use_regex", True)
    if kind == "Split":
        isolated = pre_tokenizer["behavior"] == "Isolated" and not pre_tokenizer["invert"]
        return isolated and pre_tokenizer["pattern"].get("Regex") in _SAFE_PATTERNS
    return kind in ("WhitespaceSplit", "Whitespace")


def _may_span_cut(token: dict[str, Any]) -> bool:
    """Return True if an added token could match text on both sides of a cut."""
    looks_around = any(token[name] for name in ("single_word", "lstrip", "rstrip"))
    return looks_around or _SAFE_CUT.search(token["content"]) is not None
