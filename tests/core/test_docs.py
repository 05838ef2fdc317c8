"""Pages under packages/core/docs: their links resolve, and the step page stays short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "packages" / "core" / "docs"
GENERATED = {"config.md", "cli.md", "errors.md", "messages.md"}
"""Pages in `reference` that ./run docs writes."""
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if path.name not in GENERATED]
MAX_LINKS = 13


def links(page: Path) -> list[str]:
    """Relative link targets of ``page``."""
    return [t for t in re.findall(r"\]\(([^)#]+)", page.read_text()) if "://" not in t]


def exists(page: Path, target: str) -> bool:
    """Return True for a file, and for a page or picture that ./run docs generates."""
    path = (page.parent / target).resolve()
    if path.parent == DOCS / "tutorials" and path.suffix == ".ipynb":
        return (ROOT / "notebooks" / path.name).exists()
    if path.parent == DOCS / "_figures":
        return path.name in ("mics.svg", *(f"{name}.svg" for name in figure_names()))
    generated = path.parent == DOCS / "reference" and path.name in GENERATED
    return generated or target == "llms.txt" or path.exists()


def figure_names() -> list[str]:
    """Names in the table of `ci.docs.figures`, without an import of matplotlib."""
    source = (ROOT / "ci/docs/figures.py").read_text()
    return re.findall(r'^    "(\w+)": \1,$', source, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_resolve(page):
    assert [target for target in links(page) if not exists(page, target)] == []


def test_training_step_page_needs_few_links():
    assert 0 < len(links(DOCS / "training_step.md")) <= MAX_LINKS
