"""Checks of the built site: internal links, search, and accessibility of its structure.

The search runs the site's own JavaScript in a browser: `walk` types each term of `TERMS` into the
search field and reads the first results.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

from ci import prose
from ci.docs import PAGES, ROOT

TERMS = {
    "OOM": "howto/fit_a_model",
    "resume": "howto/resume",
    "FSx": "howto/fsx",
    "two-hop": "concepts/two_hop",
    "hang": "howto/debug_hang",
    "Llama": "tutorials/03_tensor_parallel_llama howto/hugging_face",
    "cost": "howto/choose_layout",
    "S3": "howto/stream_from_s3",
    "chat": "howto/chat",
    "checkpoint": "howto/checkpoints howto/resume",
    "Slurm": "howto/launch",
    "LoRA": "howto/adapters",
    "tokenizer": "howto/prepare_data",
    "DeepSpeed": "migration/deepspeed",
    "slow": "howto/watch howto/tune",
    "SMP": "migration/smp_v1 migration/smp_v2",
    "kill": "howto/resume",
    "hybrid_shard_degree": "reference/config concepts/mics",
}
"""Terms of newcomers, each with the pages of which one must be among the first three results."""
FIRST = 3
IGNORED = {"genindex.html", "search.html"}
"""Pages of Sphinx itself, without a description or a source."""
WORDS = "hist,ans,nd,te,ser,datas,parm,fo,ba,ot,mot"
"""Names and abbreviations that codespell takes for misspellings."""


class Page(HTMLParser):
    """Links, anchors, and faults of one HTML page."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.faults: list[str] = []
        self.headings: list[int] = []
        self.language = self.title = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("id"):
            if values["id"] in self.anchors:
                self.faults.append(f"the id {values['id']!r} occurs twice")
            self.anchors.add(values["id"] or "")
        if tag == "a" and values.get("href"):
            self.links.append(values["href"] or "")
        if tag in ("img", "script", "link"):
            target = values.get("src") or values.get("href") or ""
            if target and values.get("rel") not in ("alternate", "index", "search", "next", "prev"):
                self.links.append(target)
        if tag == "img" and not values.get("alt"):
            self.faults.append(f"the picture {values.get('src', '')[:60]} has no alternative text")
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        self.language |= tag == "html" and bool(values.get("lang"))
        self.title |= tag == "title"


def links_and_structure(site: Path) -> list[str]:
    """Return faults of all pages: broken links and anchors, missing titles and texts."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    faults = []
    for path, page in pages.items():
        name = str(path.relative_to(site))
        faults += [f"{name}: {fault}" for fault in page.faults]
        if name not in IGNORED and page.headings.count(1) != 1:
            faults.append(f"{name}: has {page.headings.count(1)} headings of level 1, not one")
        if not (page.language and page.title):
            faults.append(f"{name}: has no language or no title")
        for link in page.links:
            if fault := _broken(path, link, pages):
                faults.append(f"{name}: {fault}")
    return faults


def _broken(path: Path, link: str, pages: dict[Path, Page]) -> str:
    """Return the fault of a link, or an empty string."""
    if re.match(r"(mailto|data|javascript):|(https?:)?//", link):
        return ""
    target, _, anchor = link.partition("#")
    file = (path.parent / unquote(target.partition("?")[0])).resolve() if target else path
    if not file.exists():
        return f"the link {link} leads nowhere"
    if anchor and file in pages and unquote(anchor) not in pages[file].anchors:
        return f"the link {link} names an anchor that does not exist"
    return ""


def remote_resources(site: Path) -> list[str]:
    """Return pictures, scripts and styles that a page would load from a network."""
    faults = []
    pattern = re.compile(r'<(?:img|script|link|iframe)[^>]*(?:src|href)="(https?:)?//[^"]*"')
    for path in sorted(site.rglob("*.html")):
        for match in pattern.finditer(path.read_text(encoding="utf-8")):
            faults.append(f"{path.relative_to(site)}: loads {match[0][:120]}")
    return faults


def spelling() -> list[str]:
    """Return misspelled words of the pages, or nothing where codespell is not installed."""
    files = [str(path) for path in PAGES.rglob("*.md") if path.stem not in ("messages",)]
    command = [sys.executable, "-m", "codespell_lib", "--ignore-words-list", WORDS, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "No module named" in done.stderr:
        return [f"codespell is not installed: {done.stderr.strip()}"]
    return done.stdout.splitlines()


def english() -> list[str]:
    """Return the areas of pages and notebooks whose English exceeds the limits of `ci.prose`."""
    areas = {name: prose.AREAS[name] for name in ("documentation", "notebooks")}
    found = [prose.violations(name, prose.measure_area(area)) for name, area in areas.items()]
    return [fault for fault in found if fault]


def wrong_answers(results: dict[str, list[str]]) -> Iterator[str]:
    """Yield the terms whose page is not among the first results of the search."""
    for term, expected in TERMS.items():
        found = results.get(term, [])[:FIRST]
        if not set(expected.split()) & set(found):
            yield f"search for {term!r}: expected {expected}, found {', '.join(found) or 'nothing'}"


def walk(page, site: Path) -> dict[str, list[str]]:
    """Search for every term in a browser, and return the names of the pages found.

    Args:
        page: Page of a browser with the methods `go`, `until` and `evaluate`.
        site: Folder of the built site.
    """
    results = {}
    for term in TERMS:
        page.go(f"file://{site}/search.html?q={term.replace(' ', '+')}")
        page.until(
            "document.querySelector('#search-results .search-summary') && "
            "/found|did not match/i.test(document.querySelector('#search-results').innerText)"
        )
        links = page.evaluate(
            "[...document.querySelectorAll('#search-results ul.search > li > a')]"
            ".map(a => a.getAttribute('href'))"
        )
        names = [re.sub(r"\.html.*", "", link) for link in links or []]
        results[term] = list(dict.fromkeys(names))
    return results
