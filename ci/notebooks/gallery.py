"""Render executed notebooks as web pages, and an index with a card for each.

Pages work offline: images are embedded, formulas become MathML, scripts and widgets are removed.
The index uses relative links, so that the folder can be moved or served.
"""

import base64
import html
import re
from pathlib import Path

import latex2mathml.converter
import nbformat
from nbconvert import HTMLExporter

from ci.notebooks import figures

IMAGES = {"image/png": "png", "image/jpeg": "jpg", "image/svg+xml": "svg"}
MATH = re.compile(r"(?<!\\)\$\$(?P<block>[^<]+?)\$\$|(?<![\\$])\$(?P<inline>[^$<]+?)\$")
VERBATIM = re.compile(r"(<(pre|code)\b.*?</\2>)", re.DOTALL)
SCRIPT = re.compile(r"<script\b.*?</script>", re.DOTALL)

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>nearlinear: notebooks</title>
<style>
:root {{ color-scheme: light dark; --ink: #1c2430; --dim: #5b6675; --page: #f6f7f9; --card: #fff;
        --line: #dfe3e9; --link: #1556c0; --good: #1a7f45; --bad: #b3261e; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6eaf0; --dim: #9aa6b5; --page: #12161c;
        --card: #1b2129; --line: #2c3540; --link: #82b1ff; --good: #58c98a; --bad: #ff8a80; }} }}
body {{ margin: 0; background: var(--page); color: var(--ink);
       font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }}
main {{ max-width: 72rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }}
h1 {{ font-size: 1.9rem; margin: 0 0 .25rem; }}
.lead, footer {{ color: var(--dim); }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: 1.25rem;
         margin: 2rem 0; }}
.card {{ background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
        overflow: hidden; display: flex; flex-direction: column; }}
.picture {{ position: relative; display: grid; place-items: center; aspect-ratio: 16 / 9;
           background: #fff; border-bottom: 1px solid var(--line); text-decoration: none; }}
.picture img {{ position: absolute; inset: 0; width: 100%; height: 100%; object-fit: contain; }}
.picture span {{ font-size: 3rem; font-weight: 600; color: #c3cad4; }}
.text {{ padding: 1rem 1.1rem; display: flex; flex-direction: column; flex: 1; }}
h2 {{ font-size: 1.1rem; line-height: 1.3; margin: 0 0 .4rem; }}
h2 a {{ color: inherit; text-decoration: none; }} h2 a:hover {{ color: var(--link); }}
p {{ margin: 0 0 .8rem; }} a {{ color: var(--link); }}
.facts {{ margin: auto 0 0; font-size: .85rem; color: var(--dim); }}
.passed, .failed {{ font-weight: 600; }}
.passed {{ color: var(--good); }} .failed {{ color: var(--bad); }}
pre {{ font-size: .75rem; white-space: pre-wrap; overflow-wrap: anywhere; color: var(--bad);
      margin: 0 0 .8rem; }}
</style>
</head>
<body><main>
<h1>nearlinear notebooks</h1>
<p class="lead">{summary}</p>
<div class="cards">
{cards}
</div>
<footer>Run times were measured on the machine that rendered this page.</footer>
</main></body></html>
"""

CARD = """<article class="card">
<a class="picture" href="{page}">{picture}</a>
<div class="text">
<h2><a href="{page}">{title}</a></h2>
<p>{description}</p>
{error}<p class="facts"><span class="{status}">{status}</span> · run time {seconds:.0f} s ·
{finished} · <a href="{notebook}">.ipynb</a></p>
</div>
</article>"""


TEMPLATE = """{% extends 'lab/index.html.j2' %}
{% block data_png scoped %}
{%- set alt = (output | get_metadata('alt', 'image/png') or '') | escape_html -%}
{{ super() | replace('<img ', '<img alt="' ~ alt ~ '" ', 1) }}
{%- endblock data_png %}"""


class OfflineExporter(HTMLExporter):
    """nbconvert's HTML exporter with formulas as MathML and alternative texts of figures."""

    def markdown2html(self, context, source):
        parts = VERBATIM.split(super().markdown2html(context, source))
        # split() yields: text, verbatim block, its tag name, text, ...
        return "".join(
            MATH.sub(to_mathml, part) if index % 3 == 0 else part
            for index, part in enumerate(parts)
            if index % 3 != 2
        )


# Jinja passes the context only to marked filters, and an override does not inherit the mark.
OfflineExporter.markdown2html.jinja_pass_arg = HTMLExporter.markdown2html.jinja_pass_arg


def to_mathml(match: re.Match) -> str:
    block = match["block"] is not None
    formula = html.unescape(match["block"] if block else match["inline"])
    try:
        return latex2mathml.converter.convert(formula, display="block" if block else "inline")
    except Exception as error:  # one unreadable formula must not fail the page
        print(f"gallery: formula left as text ({type(error).__name__}): {formula.strip()}")
        return f"<code>{html.escape(formula)}</code>"


def render(executed: Path) -> Path:
    """Write the executed notebook as an HTML page in the same folder."""
    notebook = nbformat.read(executed, as_version=4)
    notebook.metadata.pop("widgets", None)
    body, _ = OfflineExporter(template_name="lab", raw_template=TEMPLATE).from_notebook_node(
        notebook
    )
    page = executed.with_suffix(".html")
    page.write_text(SCRIPT.sub("", body))
    return page


def write_index(folder: Path) -> Path:
    """Write ../index.html: a card for every executed notebook in `folder`."""
    index = folder.parent / "index.html"
    cards, failed = [], 0
    for executed in sorted(folder.glob("*.ipynb")):
        notebook = nbformat.read(executed, as_version=4)
        outcome = notebook.metadata.get("nearlinear")
        if outcome is None:  # interrupted
            continue
        failed += outcome["status"] == "failed"
        cards.append(card(notebook, outcome, executed, index.parent))
    summary = f"{len(cards)} executed notebooks" + (f", {failed} failed." if failed else ".")
    index.write_text(PAGE.format(summary=summary, cards="\n".join(cards)))
    return index


def card(notebook, outcome: dict, executed: Path, base: Path) -> str:
    title, description = headline(notebook)
    image, alt = thumbnail(notebook, executed)
    picture = f"<span>{html.escape(executed.stem[:2])}</span>"
    if image:
        picture = f'<img src="{image.relative_to(base).as_posix()}" alt="{html.escape(alt)}" '
        picture += 'loading="lazy">'
    error = (
        f"<pre>{html.escape(outcome['error'].splitlines()[0])}</pre>\n" if outcome["error"] else ""
    )
    return CARD.format(
        page=executed.with_suffix(".html").relative_to(base).as_posix(),
        notebook=executed.relative_to(base).as_posix(),
        title=title or executed.stem,
        description=description,
        picture=picture,
        error=error,
        status=outcome["status"],
        seconds=outcome["seconds"],
        finished=html.escape(outcome["finished"]),
    )


def headline(notebook) -> tuple[str, str]:
    """Return a notebook's title and first paragraph as HTML without links or emphasis."""
    title = description = ""
    for cell in notebook.cells:
        tags = " ".join(cell.metadata.get("tags", []))
        if cell.cell_type != "markdown" or "papermill" in tags:  # papermill's own error banner
            continue
        for block in blocks(cell.source):
            if block.startswith("#"):
                title = title or block.lstrip("# ").strip()
            elif not description and not block.startswith(("!", "<", "|", "```")):
                description = plain(block)
        if title and description:
            break
    return plain(title), description


def blocks(source: str) -> list[str]:
    """Split Markdown into headings and paragraphs."""
    spaced = re.sub(r"^(#.*)$", r"\n\1\n", source, flags=re.MULTILINE)
    return [block.strip() for block in re.split(r"\n\s*\n", spaced) if block.strip()]


def plain(markdown: str) -> str:
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(markdown.split()))
    parts, end = [], 0
    for match in MATH.finditer(text):
        parts += [prose(text[end : match.start()]), to_mathml(match)]
        end = match.end()
    return "".join([*parts, prose(text[end:])])


def prose(text: str) -> str:
    return html.escape(re.sub(r"[*`]|\b_|_\b", "", text))


def thumbnail(notebook, executed: Path) -> tuple[Path | None, str]:
    """Save an image of the outputs in the same folder, and return it and its alternative text.

    The image is the first one, without PNG images higher than wide, which a card cannot show.
    """
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            for kind, suffix in IMAGES.items():
                data = output.get("data", {}).get(kind)
                if data is None:
                    continue
                content = data.encode() if suffix == "svg" else base64.b64decode(data)
                if suffix == "png" and content[20:24] > content[16:20]:  # height, width
                    continue
                image = executed.with_suffix(f".{suffix}")
                image.write_bytes(content)
                return image, figures.alternative_text(output)
    return None, ""
