"""Speed of the quality rules beside datatrove's filters, on the documents of a JSON lines file.

    python -m ci.benchmarks.filters [FILE] [--rounds N] [--json OUT]

The rules are those of ``--filters``, ``--languages en``, and ``--decontaminate`` with quotes from
the documents.

Both decide on the same documents, in turn; a difference in a decision, its reason or the text that
is left ends the command with status 1. The first pass of a rule meets new words, the second one
none: text in between is as fast as its share of new words allows.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ci.benchmarks.collectives import record as bench_record
from ci.command_line import make_parser
from data_prep import pii
from data_prep.decontaminate import Decontamination, read_evaluation_sets
from data_prep.documents import FILTERS
from data_prep.language import THRESHOLD, LanguageRule, fasttext_model
from data_prep.quality import Judge, QualityFilters, Rule, named_rules
from data_prep.sources.botocore_docs import botocore_documents

MODULE = "ci.benchmarks.filters"
RULES = ("gopher", "c4", "fineweb", "gopher+c4+fineweb", "pii", "language", "decontaminate")
"""Rules that are measured together."""
QUOTES = 200
"""Items of the evaluation set."""
SET = "contaminated"
"""Name of the evaluation set, which is datatrove's only reason to drop a document for it."""
DATATROVE = {
    "gopher": ("GopherRepetitionFilter", "GopherQualityFilter"),
    "c4": ("C4QualityFilter",),
    "fineweb": ("FineWebQualityFilter",),
}
"""datatrove's classes of each rule, in order; masks of personal data come last."""

Items = Sequence[dict[str, str]]
"""Items of an evaluation set, with ``label`` and perhaps ``query``."""

Decision = tuple[str | None, str | None]
"""Reason to drop a document, or None, and the text that is left."""


def by_datatrove(
    texts: Iterable[str], names: Sequence[str], more_rules: Sequence[tuple[str, Any]] = ()
) -> list[Decision]:
    """Decide by datatrove's filters, and then by ``more_rules``."""
    from datatrove.data import Document
    from datatrove.pipeline import filters, formatters

    rules = [(name, getattr(filters, kind)()) for name in names for kind in DATATROVE.get(name, ())]
    rules += more_rules
    masks = formatters.PIIFormatter(email_replacement=pii.EMAIL, ip_replacement=pii.IP)
    found: list[Decision] = []
    for text in texts:
        document, why = Document(text, id=""), None
        for name, rule in rules:
            result = rule.filter(document)
            passed, reason = result if isinstance(result, tuple) else (result, "")
            if not passed:
                why = f"{name}: {reason}"
                break
        left = masks.format(document.text) if "pii" in names else document.text
        found.append((why, None if why else left))
    return found


def decontamination_of_datatrove(items: Items) -> tuple[str, Any]:
    """Return the name and datatrove's filter that looks for ``items``."""
    from datatrove.pipeline.decont import n_grams
    from datatrove.utils.hashing import HashConfig, create_hash_func
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    # datatrove passes text to xxhash, which xxhash 3.6 and later reject
    config = n_grams.NGramsDecontConfig(hash_config=HashConfig(hash_fc="sha1"))
    indexer = object.__new__(n_grams.NGramsDecontIndexer)  # its constructor needs lighteval
    indexer.config, indexer.tokenizer = config, load_word_tokenizer("eng")
    indexer.hash_func = create_hash_func(config.hash_config)
    rule = n_grams.NGramsDecontFilter(".", config)
    hashed = (indexer.compute_hashes(item["label"], item.get("query")) for item in items)
    rule._index_hashes = dict.fromkeys(itertools.chain(*hashed), SET)
    return "decontaminate", rule


def language_of_datatrove(languages: Sequence[str]) -> tuple[str, Any]:
    """Return the name and datatrove's filter that keeps documents in ``languages``."""
    from datatrove.pipeline.filters import LanguageFilter
    from datatrove.utils.lid import FT176LID

    class Model:
        """fastText's Python class, which the package for prediction has in another form."""

        def predict(self, text: str, k: int) -> tuple[list[str], np.ndarray]:
            found = fasttext_model().predict(text + "\n", k, 0.0, "strict")
            return [label for _, label in found], np.array([score for score, _ in found])

    rule = object.__new__(LanguageFilter)  # its constructor needs the package for training
    rule.languages, rule.language_threshold = [*languages], THRESHOLD
    rule.backend, rule.label_only, rule.keep_top_pairs_threshold = "ft176", False, -1
    rule.model = FT176LID(rule.languages)
    rule.model._model = Model()

    class WithReason:
        """The filter, which gives no reason."""

        def filter(self, document: Any) -> tuple[bool, str]:
            passed, found = bool(rule.filter(document)), document.metadata
            uncertain = found["language_score"] <= THRESHOLD
            return passed, "uncertain" if uncertain else found["language"]

    return "language", WithReason()


def by_rules(
    texts: Iterable[str],
    names: Sequence[str],
    judge: Judge | None = None,
    more_rules: Sequence[tuple[str, Rule]] = (),
) -> list[Decision]:
    """Decide by `data_prep.quality`, and then by ``more_rules``."""
    decisions = map(QualityFilters([*named_rules(names), *more_rules], judge).judge, texts)
    return [(why, None if why else left) for why, left in decisions]


def decontamination(items: Items) -> tuple[str, Rule]:
    """Return the name and the rule of `data_prep.decontaminate` that looks for ``items``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{SET}.jsonl")
        file.write_text("".join(json.dumps(item) + "\n" for item in items))
        return "decontaminate", Decontamination(read_evaluation_sets([file]))


MORE_RULES: dict[str, tuple[Callable[[Items], Any], Callable[[Items], Any]]] = {
    "language": (
        lambda items: ("language", LanguageRule(["en"])),
        lambda items: language_of_datatrove(["en"]),
    ),
    "decontaminate": (decontamination, decontamination_of_datatrove),
}
"""Makers of rules outside `FILTERS` from the evaluation set: ours, and datatrove's."""


def measure(texts: list[str], rounds: int) -> list[dict]:
    """Return a record for each set of rules: megabytes per second of processor time."""
    megabytes = sum(len(text.encode("utf-8", "replace")) for text in texts) / 1e6
    by_rules(texts[:1], FILTERS)  # compiles the loops
    draw = random.Random(1)
    items = [{"label": " ".join(_quote(draw.choice(texts), draw))} for _ in range(QUOTES)]
    records = []
    for measured in RULES:
        names = tuple(name for name in measured.split("+") if name in FILTERS)
        more = [MORE_RULES[measured]] if measured in MORE_RULES else []
        theirs_more = [make_theirs(items) for _, make_theirs in more]
        first, again, theirs, different = [], [], [], 0
        for _ in range(rounds):
            judge, ours_more = Judge(), [make_ours(items) for make_ours, _ in more]
            by_rules(["A word."], names, judge, ours_more)  # loads spaCy's lazy parts
            first.append(_seconds(partial(by_rules, texts, names, judge, ours_more))[0])
            seconds, ours = _seconds(partial(by_rules, texts, names, judge, ours_more))
            again.append(seconds)
            seconds, expected = _seconds(partial(by_datatrove, texts, names, theirs_more))
            theirs.append(seconds)
            different = sum(a != b for a, b in zip(ours, expected, strict=True))
        speeds = [megabytes / statistics.median(each) for each in (first, again, theirs)]
        records.append({"rules": measured,
                        "megabytes": megabytes, "documents": len(texts),
                        "new_words": speeds[0], "known_words": speeds[1], "datatrove": speeds[2],
                        "dropped": sum(left is None for _, left in expected),
                        "different": different})  # fmt: skip
    return records


def _quote(text: str, draw: random.Random) -> list[str]:
    words = text.split()
    begin = draw.randrange(max(1, len(words) - 40))
    return words[begin : begin + 40]


def _seconds(call: Callable[[], list[Decision]]) -> tuple[float, list[Decision]]:
    begin = time.process_time()
    found = call()
    return time.process_time() - begin, found


def render(records: list[dict]) -> str:
    """Return a Markdown table of megabytes per second."""
    lines = ["| rules | new words | known words | datatrove | dropped | different |",
             "|:--|--:|--:|--:|--:|--:|"]  # fmt: skip
    for each in records:
        slower = each["datatrove"]
        ratios = [f"{each[k]:.1f} ({each[k] / slower:.0f}x)" for k in ("new_words", "known_words")]
        shown = [each["rules"], *ratios, f"{slower:.2f}", f"{each['dropped']:,}",
                 str(each["different"])]  # fmt: skip
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def damaged(text: str, draw: random.Random) -> str:
    """Return a text with a fault that some rule looks for."""
    lines, found = text.split("\n"), text.split(" ")
    at, kind = draw.randrange(len(found)), draw.randrange(10)
    if kind == 0:
        lines[1:1] = [draw.choice(lines)] * draw.randint(1, 8)
    elif kind == 1:
        found[at:at] = found[at : at + draw.randint(2, 12)] * draw.randint(1, 30)
    elif kind == 2:
        lines = ["- " + line if draw.random() < 0.95 else line for line in lines]
    elif kind == 3:
        lines = [line + "..." if draw.random() < 0.4 else line for line in lines]
    elif kind == 4:
        return text[: draw.randint(20, 900)]
    elif kind == 5:
        found = [word + draw.choice("#…!.") if draw.random() < 0.2 else word for word in found]
    elif kind == 6:
        lines = [line[: draw.randint(5, 60)] for line in lines]
    elif kind == 7:
        odd = [":)", ": (", "8)", "a.m.", "10am", "can't", ";-)", "\u00a0", "\t", "\u2003", "  ",
               "IS_ALPHA", "U.S.", "a.b@c.de", "8.8.8.8", "10.0.0.1", "cant",
               "(x)", "http://a.b/c?d", "e.g.", "3,000"]  # fmt: skip
        found = [draw.choice(odd) if draw.random() < 0.3 else word for word in found]
    elif kind == 8:
        phrases = ["Lorem ipsum dolor sit.", "Enable javascript now please.", "a { b } c d.",
                   "We use cookies here now.", "See [1] and [citation needed] x.",
                   "x" * 1200 + " a b c."]  # fmt: skip
        lines.insert(draw.randrange(len(lines)), draw.choice(phrases))
    else:
        odd = "\u0085\u2028\x1c\x0b\u200b\u00adé漢😀\ufeff\n"
        return "".join(draw.choice(odd) if draw.random() < 0.02 else each for each in text)
    return "\n".join(lines) if kind in (0, 2, 3, 6, 8) else " ".join(found)


def _documents(file: Path | None) -> Iterator[str]:
    if file is None:
        yield from botocore_documents()
    else:
        with file.open(encoding="utf-8") as lines:
            yield from (json.loads(line)["text"] for line in lines)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser(MODULE, __doc__)
    parser.add_argument("file", type=Path, nargs="?", help="JSON lines with a text per line "
                        "(default: the documentation inside botocore)")  # fmt: skip
    parser.add_argument("--damaged", type=int, default=0, metavar="N",
                        help="add N copies of documents, with faults")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the records")
    options = parser.parse_args(argv)
    if options.file and not options.file.is_file():
        parser.error(f"no file {options.file}")
    from loguru import logger

    logger.remove()  # datatrove's messages
    texts = [text for text in _documents(options.file) if text.strip()]
    draw = random.Random(0)
    texts += [damaged(draw.choice(texts), draw) for _ in range(options.damaged)]
    records = measure(texts, options.rounds)
    megabytes = records[0]["megabytes"]
    print(f"{len(texts):,} documents, {megabytes:.1f} MB; MB per second of processor time\n")
    print(render(records))
    if options.json:
        header = bench_record.header(MODULE, argv, "numba", "spacy", "datatrove")
        bench_record.write(options.json, {**header, "results": records})
    return 1 if any(each["different"] for each in records) else 0


if __name__ == "__main__":
    sys.exit(main())
