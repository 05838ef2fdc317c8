"""Measure the English of docstrings, comments and Markdown: ``python -m ci.prose``.

    python -m ci.prose                       figures and limits of every area
    python -m ci.prose --worst 20 ci tests   also the places to rewrite in these areas

A technical sentence names its subject. Free relative clauses ("what has been gathered") and openers
without a noun ("Of each unit: ...") replace the name of a thing by a pronoun, and the text can
neither be searched nor read on its own. Two figures measure this per area:

- occurrences of "what" per 1,000 words,
- the percentage of texts that open with a word of `OPENERS` and are not questions.

A text is a docstring, a block of comment lines, or a paragraph or list item of Markdown.
torch.distributed measures 0.2 and 2.4 %.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

OPENERS = frozenset(
    "all another as both does has how is it its neither once one ones of she so such that they "
    "those what whatever where whether which who whom whose he".split()
)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
DIRECTIVE = re.compile(r"#\s*(!|%%|noqa|type:|fmt:|pyright:|ruff:)|# ?[-=]{4}")
QUESTION = re.compile(r"[^.!:]*\?")
LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")


class Text(NamedTuple):
    """A docstring, comment block, or Markdown paragraph."""

    path: str
    line: int
    text: str
    has_opener: bool = True
    """False for tables, which have no first sentence."""


@dataclass(frozen=True)
class Area:
    """Paths with common limits."""

    paths: tuple[str, ...]
    """Files and folders relative to the repository root."""
    max_what: float
    """Maximum number of "what" per 1,000 words."""
    max_openers: float
    """Maximum percentage of texts with an opener of `OPENERS`."""
    suffixes: tuple[str, ...] = (".py",)


AREAS = {
    "packages/core": Area(("packages/core/src",), 0.5, 3.0),
    "packages/collectives": Area(("packages/collectives",), 1.0, 5.0),
    "data_prep": Area(("data_prep",), 1.0, 5.0),
    "ci": Area(("ci", "run"), 1.0, 5.0),
    "tests": Area(("tests",), 1.0, 5.0),
    "README.md": Area(
        (
            "README.md",
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "ci/benchmarks/compare/README.md",
        ),
        1.0,
        5.0,
        (".md",),
    ),
    "package READMEs": Area(
        ("packages/core/README.md", "packages/collectives/README.md", "data_prep/README.md"),
        1.0,
        5.0,
        (".md",),
    ),
    "documentation": Area(("packages/core/docs",), 1.0, 5.0, (".md",)),
    "notebooks": Area(("notebooks",), 1.0, 5.0),
}
"""Areas with their limits. A limit may only be lowered."""


@dataclass
class Figures:
    """Counts of one area."""

    words: int = 0
    whats: int = 0
    texts: int = 0
    openers: int = 0
    places: list[tuple[int, Text]] = field(default_factory=list)
    """Texts to rewrite, with their weight."""

    @property
    def what_rate(self) -> float:
        """Number of "what" per 1,000 words."""
        return 1000 * self.whats / max(1, self.words)

    @property
    def opener_rate(self) -> float:
        """Percentage of texts with an opener of `OPENERS`."""
        return 100 * self.openers / max(1, self.texts)

    def worst(self, count: int) -> list[str]:
        """Return the texts with the most findings as ``path:line: beginning``."""
        ranked = sorted(self.places, key=lambda each: (-each[0], each[1].path, each[1].line))
        return [
            f"{text.path}:{text.line}: {' '.join(text.text.split())[:90]}"
            for _, text in ranked[:count]
        ]


def measure_area(area: Area) -> Figures:
    """Measure the tracked files of an area."""
    return measure_texts(text for path in tracked_files(area) for text in texts_of(path))


def measure_texts(texts: Iterable[Text]) -> Figures:
    """Count words, "what" and openers."""
    figures = Figures()
    for text in texts:
        words = WORD.findall(text.text.lower())
        if not words:
            continue
        whats = words.count("what")
        opens = text.has_opener and words[0] in OPENERS and not QUESTION.match(text.text)
        figures.words += len(words)
        figures.whats += whats
        figures.texts += text.has_opener
        figures.openers += opens
        if whats or opens:
            figures.places.append((2 * whats + opens, text))
    return figures


def tracked_files(area: Area) -> list[Path]:
    """Return the tracked files of an area, without third-party code."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", *area.paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.splitlines() if "/third_party/" not in name]
    return [p for p in paths if (p.suffix in area.suffixes or p.name == "run") and p.exists()]


def texts_of(path: Path) -> Iterator[Text]:
    """Yield the texts of a Python file, a paired notebook or a Markdown file."""
    source = path.read_text(encoding="utf-8")
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    if path.suffix == ".md":
        yield from markdown_texts(name, source.splitlines())
        return
    if re.search(r"^# %%", source, re.MULTILINE):
        markdown, source = split_notebook(source)
        yield from markdown_texts(name, markdown)
    yield from python_texts(name, source)


def split_notebook(source: str) -> tuple[list[str], str]:
    """Split a percent script into its Markdown lines and its code, with unchanged line numbers."""
    markdown, code, in_markdown = [], [], False
    for line in source.splitlines():
        if line.startswith("# %%"):
            in_markdown = "[markdown]" in line
            markdown.append("")
            code.append("")
        else:
            markdown.append(line.removeprefix("#").removeprefix(" ") if in_markdown else "")
            code.append("" if in_markdown else line)
    return markdown, "\n".join(code) + "\n"


def python_texts(name: str, source: str) -> Iterator[Text]:
    """Yield docstrings, docstrings of attributes, and blocks of consecutive comment lines."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            if (
                isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ):
                yield Text(name, item.lineno, item.value.value)
    block: list[str] = []
    start, last = 0, (0, False)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or DIRECTIVE.match(token.string):
            continue
        line, alone = token.start[0], not token.line[: token.start[1]].strip()
        continues = block and alone and last == (line - 1, True)
        if block and not continues:
            yield Text(name, start, " ".join(block))
            block = []
        start = start if block else line
        block.append(token.string.lstrip("# "))
        last = line, alone
    if block:
        yield Text(name, start, " ".join(block))


def markdown_texts(name: str, lines: list[str]) -> Iterator[Text]:
    """Yield paragraphs, list items and headings outside code blocks, and tables."""
    fenced, start, block = False, 0, []

    def finished() -> Iterator[Text]:
        if block:
            yield Text(name, start, " ".join(block), not block[0].startswith("|"))
            block.clear()

    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            yield from finished()
        elif fenced or line.startswith("    ") and not block:
            continue
        elif not line.strip() or line.lstrip().startswith(("<!--", "$$")):
            yield from finished()
        else:
            item, heading = LIST_ITEM.match(line), line.startswith("#")
            if item or heading:
                yield from finished()
            start = start if block else number
            block.append(line[item.end() :] if item else line)
            if heading:
                yield from finished()
    yield from finished()


def violations(name: str, figures: Figures, worst: int = 10) -> str:
    """Return a message if the figures of an area exceed its limits, otherwise an empty string."""
    area = AREAS[name]
    faults = []
    if figures.what_rate > area.max_what:
        faults.append(f'{figures.what_rate:.1f} "what" per 1,000 words (limit {area.max_what})')
    if figures.opener_rate > area.max_openers:
        limit = f"(limit {area.max_openers} %)"
        faults.append(f"{figures.opener_rate:.1f} % of the texts open without a noun {limit}")
    if not faults:
        return ""
    places = "\n".join(f"  {place}" for place in figures.worst(worst))
    return (
        f"{name}: {' and '.join(faults)}. Rewrite: begin with a verb in the imperative or a noun "
        f"phrase, and name things by nouns. All places: python -m ci.prose --worst 100 "
        f"'{name}'. The worst:\n{places}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.prose",
        description='Count "what" and weak openers in docstrings, comments and Markdown.',
    )
    parser.add_argument("areas", nargs="*", help=f"among {', '.join(AREAS)} (default: all)")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="list N places per area")
    options = parser.parse_args(argv)
    unknown = [name for name in options.areas if name not in AREAS]
    if unknown:
        parser.error(f"unknown areas {', '.join(unknown)}: choose from {', '.join(AREAS)}")
    failed = False
    print(f"{'area':22}{'words':>8}{'what/1000':>11}{'limit':>7}{'openers':>10}{'limit':>7}")
    for name in options.areas or AREAS:
        area, figures = AREAS[name], measure_area(AREAS[name])
        print(
            f"{name:22}{figures.words:8}{figures.what_rate:11.1f}{area.max_what:7.1f}"
            f"{figures.opener_rate:8.1f} %{area.max_openers:5.1f} %"
        )
        for place in figures.worst(options.worst):
            print(f"  {place}")
        failed |= bool(violations(name, figures))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
