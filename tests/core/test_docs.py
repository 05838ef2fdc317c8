"""Pages under packages/core/docs: their links resolve, and the step page stays short."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "packages" / "core" / "docs"
PAGES = sorted(DOCS.glob("*.md"))
MAX_LINKS = 12


def links(page: Path) -> list[str]:
    """Relative link targets of ``page``."""
    return [t for t in re.findall(r"\]\(([^)#]+)", page.read_text()) if "://" not in t]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    assert all((page.parent / target).exists() for target in links(page))


def test_training_step_page_needs_few_links():
    assert 0 < len(links(DOCS / "training_step.md")) <= MAX_LINKS
