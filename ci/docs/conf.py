"""Configuration of Sphinx: pages in Markdown, executed notebooks, no network when read or built."""

from __future__ import annotations

import os
import re

import latex2mathml.converter
from docutils import nodes
from sphinx.application import Sphinx

import nearlinear
from ci.docs import PAGES, REPOSITORY, ROOT

SOURCE_SUFFIXES = (".py", "")
LINK = re.compile(r"(?<!!)(\[[^\]]*\])\(([^)#:]+)\)")

project = "nearlinear"
author = "The nearlinear authors"
copyright = author
release = version = nearlinear.__version__
language = "en"

extensions = ["myst_nb", "sphinx_design", "sphinx_copybutton"]
exclude_patterns: list[str] = []
nitpicky = True
html_theme = "furo"
html_title = "nearlinear"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True

nb_execution_mode = "off"  # ci.docs.tutorials inserts outputs of ci.notebooks
nb_merge_streams = True
nb_mime_priority_overrides = [("html", "text/html", 15)]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_inline"]
myst_dmath_allow_digits = False
myst_dmath_allow_space = False
myst_dmath_double_inline = True


def _mathml(formula: str, display: str) -> str:
    return latex2mathml.converter.convert(formula, display=display)


def visit_inline_math(translator, node) -> None:
    translator.body.append(_mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def visit_block_math(translator, node) -> None:
    formula = re.sub(r"\\(begin|end)\{(aligned|split)\}", "", node.astext())
    translator.body.append(f'<div class="math">{_mathml(formula, "block")}</div>')
    raise nodes.SkipNode


def add_description(app, page, template, context, doctree) -> None:
    """Add the first paragraph of a page as its description, and a link to its Markdown twin."""
    if doctree is None:
        return
    first = next(iter(doctree.findall(nodes.paragraph)), None)
    if first is not None:
        text = re.sub(r"\s+", " ", first.astext())[:300].replace('"', "&quot;").replace("<", "&lt;")
        context["metatags"] = context.get("metatags", "") + (
            f'<meta name="description" content="{text}" />\n'
            f'<link rel="alternate" type="text/markdown" href="{page.rsplit("/", 1)[-1]}.md" />'
        )


def link_sources(app: Sphinx, page: str, source: list[str]) -> None:
    """Point links to source files at the repository; without its address, keep their text only."""
    address = os.environ.get(REPOSITORY, "").rstrip("/")

    def linked(match: re.Match) -> str:
        file = (PAGES / page).parent.joinpath(match[2]).resolve()
        if not file.is_file() or file.suffix not in SOURCE_SUFFIXES or file.is_relative_to(PAGES):
            return match[0]
        text = match[1]
        return f"{text}({address}/blob/main/{file.relative_to(ROOT)})" if address else text[1:-1]

    if not page.startswith("tutorials/"):  # notebooks, read as JSON
        source[0] = LINK.sub(linked, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer(
        "mathml",
        inline_renderers=(visit_inline_math, None),
        block_renderers=(visit_block_math, None),
    )
    app.connect("source-read", link_sources)
    app.connect("html-page-context", add_description)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


html_math_renderer = "mathml"
