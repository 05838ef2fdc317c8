"""Documentation site: ``./run docs``, or ``python -m ci.docs`` where Sphinx is installed.

`reference` generates pages, `figures` draws the figures of the concepts, `tutorials` takes executed
notebooks, `conf` configures Sphinx, `twins` writes llms.txt and Markdown twins, and `checks` walks
the built site. Generated files lie beside the pages and are ignored by git.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "packages" / "core" / "docs"
SITE = ROOT / "artifacts" / "docs"
REPOSITORY = "NEARLINEAR_REPOSITORY"
"""Variable with the repository's address, as for `ci.wheels`. Pages link to source files, and those
of a repository on GitHub to each notebook in Colab and Studio Lab."""
