"""Long documents in pieces whose ids, one after another, are those of the whole.

A pre-tokenizer that is known to end a word where a letter of ASCII comes before a space or the end
of a line may be cut there: the words before it do not look beyond it, nor those after it back, and
a model never sees more than a word. For another pre-tokenizer a document is one piece.
"""

import json
import logging
import re
from collections.abc import Iterator
from string import ascii_letters

from data_prep.tokenizer import TextTokenizer

logger = logging.getLogger("data_prep")

PIECE = 1024 * 1024
"""characters of a piece, about: an encoder takes some ten times its bytes of memory"""
LONG = 16 * 1024 * 1024
"""characters of a piece that is told of, as no place to cut was found"""

_CUT = re.compile(r"[A-Za-z](?=[ \n])")
_ENDING_WORDS = (
    # GPT-2
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # Llama 3 (cl100k), Qwen 2: they differ in how many digits a word has
    *(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + digits
      + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+" for digits in ("{1,3}", "")),
)  # fmt: skip
"""patterns of words that none of their alternatives lets go on from a letter to a space"""


def can_cut(words: TextTokenizer) -> bool:
    """Whether documents may be cut for this tokenizer."""
    document = json.loads(words.json_text)
    added = [token for token in document.get("added_tokens", []) if not token["special"]]
    if document.get("normalizer") or any(map(_spans_words, added)):
        return False
    return _ends_words(document.get("pre_tokenizer") or {})


def pieces(text: str) -> Iterator[str]:
    """`text` cut where that is safe, into pieces of about `PIECE` characters."""
    start = 0
    while len(text) - start > PIECE:
        end = _last_cut(text, start + 1, start + PIECE)
        if end is None:
            found = _CUT.search(text, start + PIECE - 1)
            if found is None:
                break
            end = found.end()
        yield text[start:end]
        start = end
    yield text[start:]


def _last_cut(text: str, first: int, end: int) -> int | None:
    """The last place before `end`, from `first` on, where `_CUT` matches before it."""
    for mark in " \n":
        at = end
        while (at := text.rfind(mark, first, at)) >= 0:
            if text[at - 1] in ascii_letters:
                return at
    return None


def tell_if_long(length: int) -> None:
    """Say of a piece of so many characters that it takes memory."""
    if length > LONG:
        logger.warning(
            "%d characters are encoded at once, more than %d: there is no place to cut that leaves "
            "their ids as they are, and a worker takes about %.1f GiB; cut such documents before",
            length, LONG, 12 * length / 2**30,
        )  # fmt: skip


def _ends_words(pre_tokenizer: dict) -> bool:
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        first, *rest = pre_tokenizer["pretokenizers"]
        return _ends_words(first) and all(
            each["type"] == "ByteLevel" and not each["add_prefix_space"] for each in rest
        )
    if kind == "ByteLevel":
        return not pre_tokenizer["add_prefix_space"] and pre_tokenizer.get("use_regex", True)
    if kind == "Split":
        whole = pre_tokenizer["behavior"] == "Isolated" and not pre_tokenizer["invert"]
        return whole and pre_tokenizer["pattern"].get("Regex") in _ENDING_WORDS
    return kind in ("WhitespaceSplit", "Whitespace")


def _spans_words(token: dict) -> bool:
    """Whether an added token may be read across a cut."""
    looks_around = any(token[name] for name in ("single_word", "lstrip", "rstrip"))
    return looks_around or _CUT.search(token["content"]) is not None
