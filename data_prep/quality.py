"""Quality rules for English text: those of Gopher, C4 and FineWeb, with their published thresholds.

The masks of `pii` are a rule, too. Decisions, names and order of the rules equal those of
datatrove's filters. Rules over words run in compiled loops, those over lines in Python.

Sources: Rae et al. 2021 (Gopher, appendix A), Raffel et al. 2020 (C4, section 2.2), Penedo et al.
2024 (FineWeb, section 3.6).
"""

import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from data_prep import pii
from data_prep import word_loops as loops
from data_prep.words import Chunks, WordTable


def _characters(ranges: str) -> frozenset[str]:
    """Return the characters of ranges of hexadecimal code points."""
    found = set()
    for word in ranges.split():
        first, _, last = word.partition("-")
        found.update(map(chr, range(int(first, 16), int(last or first, 16) + 1)))
    return frozenset(found)


SENTENCE_ENDS = _characters(
    "21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e "
    "1735-1736 17d4-17d6 17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e "
    "1c3b-1c3c 1c7e-1c7f 203c-203d 2047-2049 2e2e 2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7 "
    "a876-a877 a8ce-a8cf a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb fe52 fe56-fe57 ff01 ff0e ff1f "
    "ff61 10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 110be-110c1 11141-11143 111c5-111c6 "
    "111cd 111de-111df 11238-11239 1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 "
    "11641-11642 1173c-1173e 11944 11946 11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 "
    "11f43-11f44 16a6e-16a6f 16af5 16b37-16b38 16b44 16e98 1bc9f 1da88"
)
"""Characters that end a sentence in some script (Unicode's Sentence_Terminal)."""

PUNCTUATION = _characters(
    "0-8 b-1f 21-2f 3a-40 5b-60 7b-9f ab b4 bb 2013-2014 2019 201c-201e 2026 2236 2501 25ba "
    "3001-3002 3008-300b 300c-300d 3010-3011 ff01 ff05 ff08-ff09 ff0c ff0e ff11 ff1a-ff1b ff1f ff5e"
)
SYMBOLS = SENTENCE_ENDS | PUNCTUATION
"""Punctuation and control characters, of which a word cannot consist."""

FREQUENT_N_GRAMS = np.array([0.20, 0.18, 0.16])
"""Largest share of a text's characters in its most frequent n-gram, for n from 2."""

REPEATED_FROM, REPEATED_N_GRAMS = 5, np.array([0.15, 0.14, 0.13, 0.12, 0.11, 0.10])
"""The smallest n, and the largest share of a text's characters in repeated n-grams for each n."""

_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_C4_ENDS = (".", "?", "!", '"', "'")
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies",
             "use cookies")  # fmt: skip
_FINEWEB_ENDS = tuple(SENTENCE_ENDS)

Rule = Callable[["Judge", str], tuple[str | None, str]]
"""Returns the reason to drop a text, or None, and the text, from which lines may be removed."""


class Judge:
    """Words and scratch tables of the rules."""

    def __init__(self):
        self.table = WordTable(SYMBOLS)
        self._keys, self._counts = np.empty(0, np.uint64), np.empty(0, np.int32)
        self.begin()

    def begin(self) -> None:
        """Begin another document."""
        self.table.limit()
        self._text: str | None = None
        self._words: np.ndarray | None = None

    def chunks(self, text: str) -> Chunks:
        """Return the chunks of a text; those of the last text are kept."""
        if text is not self._text:
            self._text, self._chunks, self._words = text, self.table.find(text), None
        return self._chunks

    def words(self, text: str) -> np.ndarray:
        """Return the words of a text, int32 [words]; those of the last text are kept."""
        chunks = self.chunks(text)
        if self._words is None:
            self._words = self.table.numbers(chunks)
        return self._words

    def scratch(self, words: int) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and counts of a scratch table for so many words."""
        places = 1 << (2 * words).bit_length()
        if places > len(self._keys):
            self._keys, self._counts = np.empty(places, np.uint64), np.empty(places, np.int32)
        return self._keys[:places], self._counts[:places]


def gopher_repetition(judge: Judge, text: str) -> tuple[str | None, str]:
    """Drop texts that repeat paragraphs, lines or n-grams of words."""
    for parts, name in ((paragraphs(text), "para"), (lines_of(text), "line")):
        repeated, characters = repetitions(parts)
        if repeated / len(parts) > 0.3:
            return f"dup_{name}_frac", text
        if characters / len(text) > 0.2:
            return f"dup_{name}_char_frac", text
    words = judge.words(text)
    measured = (words, judge.table.lengths, len(text))
    keys, counts = judge.scratch(len(words))
    if n := loops.frequent_n_gram(*measured, FREQUENT_N_GRAMS, keys, counts):
        return f"top_{n}_gram", text
    rule = (*judge.table.joined_hashes, REPEATED_FROM, REPEATED_N_GRAMS)
    if n := loops.repeated_n_grams(*measured, *rule, keys):
        return f"duplicated_{n}_n_grams", text
    return None, text


def gopher_quality(judge: Judge, text: str) -> tuple[str | None, str]:
    """Drop texts that are too short, too long, or made of symbols, bullets or ellipses."""
    words = judge.words(text)
    proper, characters, alphabetic, stops = judge.table.count_kinds(words)
    if proper < 50:
        return "gopher_short_doc", text
    if proper > 100_000:
        return "gopher_long_doc", text
    if characters / proper < 3:
        return "gopher_below_avg_threshold", text
    if characters / proper > 10:
        return "gopher_above_avg_threshold", text
    if text.count("#") / len(words) > 0.1:
        return "gopher_too_many_hashes", text
    if (text.count("...") + text.count("…")) / len(words) > 0.1:
        return "gopher_too_many_ellipsis", text
    lines = text.splitlines()
    if sum(line.lstrip().startswith(("•", "-")) for line in lines) / len(lines) > 0.9:
        return "gopher_too_many_bullets", text
    if sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines) > 0.3:
        return "gopher_too_many_end_ellipsis", text
    if alphabetic / len(words) < 0.8:
        return "gopher_below_alpha_threshold", text
    if stops.bit_count() < 2:
        return "gopher_enough_stop_words", text
    return None, text


def c4(judge: Judge, text: str) -> tuple[str | None, str]:
    """Remove lines that are no sentences; drop texts with fewer than five sentences left."""
    kept, whole = [], text.lower()
    has_phrase = any(phrase in whole for phrase in ("lorem ipsum", "javascript", *_POLICIES))
    for line in text.splitlines():
        line = line.strip()
        words = line.split(None, 2)  # the number of words below 3
        if len(line) > 1000 and max(map(len, line.split())) > 1000:
            continue
        if "[" in line:
            line = _CITATION.sub("", line)
        if not line.endswith(_C4_ENDS) or line.endswith("...") or len(words) < 3:
            continue
        lower = line.lower() if has_phrase else ""
        if "lorem ipsum" in lower:
            return "lorem_ipsum", text
        if "javascript" in lower:
            continue
        if "{" in line:
            return "curly_bracket", text
        if not any(policy in lower for policy in _POLICIES):
            kept.append(line)
    left = "\n".join(kept).strip()
    if judge.table.count_sentences(judge.chunks(left)) < 5:
        return "too_few_sentences", text
    return None, left


def fineweb(judge: Judge, text: str) -> tuple[str | None, str]:
    """Drop lists: texts of short, repeated or unfinished lines."""
    lines = [line for line in text.split("\n") if line and not line.isspace()]
    if not lines:
        return "empty", text
    if sum(line.endswith(_FINEWEB_ENDS) for line in lines) / len(lines) < 0.12:
        return "line_punct_ratio", text
    if sum(len(line) <= 30 for line in lines) / len(lines) > 0.67:
        return "short_line_ratio", text
    feeds = text.count("\n")
    if repetitions(lines)[1] / (len(text) - feeds) > 0.01:
        return "char_dup_ratio", text
    if feeds / judge.table.count(judge.chunks(text)) > 0.3:
        return "list_ratio", text
    return None, text


def mask_personal_data(judge: Judge, text: str) -> tuple[None, str]:
    """Mask e-mail and IP addresses."""
    return None, pii.mask(text)


def paragraphs(text: str) -> list[str]:
    """Split a text at two or more line feeds."""
    first, *others = text.strip().split("\n\n")
    return [first, *filter(None, (part.lstrip("\n") for part in others))]


def lines_of(text: str) -> list[str]:
    """Split a text at line feeds, of which several in a row count as one."""
    lines = text.split("\n")
    return [lines[0], *filter(None, lines[1:-1]), lines[-1]] if len(lines) > 1 else lines


def repetitions(parts: Sequence[str]) -> tuple[int, int]:
    """Count the parts that occurred before, and their characters."""
    if len(parts) == len(set(parts)):
        return 0, 0
    number = Counter(parts)
    again = [(times - 1, len(part)) for part, times in number.items()]
    return sum(times for times, _ in again), sum(times * length for times, length in again)


RULES: dict[str, tuple[Rule, ...]] = {
    "gopher": (gopher_repetition, gopher_quality),
    "c4": (c4,),
    "fineweb": (fineweb,),
    "pii": (mask_personal_data,),
}
"""Rules by their name on the command line, in order."""


_own = threading.local()


def _judge_of_this_thread() -> Judge:
    """Return the tables of this thread, so that words are split once for all input splits."""
    if not hasattr(_own, "judge"):
        _own.judge = Judge()
    return _own.judge


def named_rules(names: Sequence[str]) -> list[tuple[str, Rule]]:
    """Return the rules of keys of `RULES`, each with its key."""
    return [(name, rule) for name in names for rule in RULES[name]]


class QualityFilters:
    """Rules in order, which judge one document at a time.

    Rules may change the documents that they keep: C4's remove lines, and addresses are masked.
    """

    def __init__(self, rules: Sequence[tuple[str, Rule]], judge: Judge | None = None):
        """Create the rules.

        Args:
            rules: Names and rules.
            judge: Tables of words; those of this thread by default, which all rules share.
        """
        self._rules, self._judge = rules, judge or _judge_of_this_thread()

    def judge(self, text: str) -> tuple[str | None, str]:
        """Return the rule and reason that drop a text, or None, and the text as it was changed."""
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode("utf-8")
        self._judge.begin()
        for name, rule in self._rules:
            reason, text = rule(self._judge, text)
            if reason:
                return f"{name}: {reason}", text
        return None, text
