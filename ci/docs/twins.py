"""Files for language models: a Markdown twin of each page, llms.txt, and llms-full.txt.

llms.txt follows llmstxt.org: a title, a summary, and a list of links with descriptions.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat

from ci.docs import PAGES

DIRECTIVE = re.compile(
    r"^(`{3,}|:{3,})\{(?P<name>[\w-]+)\}.*?^\1[ ]*$\n?", re.DOTALL | re.MULTILINE
)
MAX_OUTPUT = 4000  # characters of the text outputs of a cell
SECTIONS = {
    "start": "Start",
    "tutorials": "Tutorials",
    "problems": "Problems",
    "howto": "How-to guides",
    "concepts": "Concepts",
    "reference": "Reference",
    "migration": "Migration",
    "architecture": "Architecture",
    "evidence": "Evidence",
}
TOP_LEVEL = {
    "api": "reference",
    "models": "reference",
    "models_transformers_4": "reference",
    "training_step": "architecture",
    "gpu_evidence": "evidence",
    "faults": "evidence",
    "mutants": "evidence",
}
"""Sections of the pages that are not in the folder of their section."""


def write(site: Path) -> list[str]:
    """Write the twins and both lists into ``site``, and return the names of all pages."""
    texts = {}
    for path in sorted([*PAGES.rglob("*.md"), *PAGES.rglob("*.ipynb")]):
        name = str(path.relative_to(PAGES).with_suffix(""))
        text = from_notebook(path) if path.suffix == ".ipynb" else plain(path)
        texts[name] = text.strip() + "\n"
        twin = site / f"{name}.md"
        twin.parent.mkdir(parents=True, exist_ok=True)
        twin.write_text(texts[name], encoding="utf-8")
    (site / "llms.txt").write_text(overview(texts), encoding="utf-8")
    full = "\n\n".join(f"<!-- {name}.md -->\n\n{text}" for name, text in texts.items())
    (site / "llms-full.txt").write_text(full, encoding="utf-8")
    return list(texts)


def plain(path: Path) -> str:
    """Return the Markdown of a page with includes resolved and directives of the site removed."""
    text = path.read_text(encoding="utf-8")

    def resolved(match: re.Match) -> str:
        block = match[0]
        if match["name"] == "include":
            target = block.splitlines()[0].partition("} ")[2].strip()
            return plain((path.parent / target).resolve())
        if match["name"] == "toctree" and ":hidden:" not in block:
            return _contents(path.parent, block)
        return "" if match["name"] in ("index", "toctree", "grid") else block

    text = DIRECTIVE.sub(resolved, text)
    return re.sub(r"\n{3,}", "\n\n", text.replace(".ipynb)", ".md)"))


def _contents(folder: Path, toctree: str) -> str:
    """Return the pages of a table of contents as a list of links."""
    names = [line for line in toctree.splitlines()[1:-1] if line and not line.startswith(":")]
    lines = []
    for name in names:
        page, notebook = folder / f"{name}.md", folder / f"{name}.ipynb"
        if page.exists() or notebook.exists():
            text = plain(page) if page.exists() else from_notebook(notebook)
            heading, about = describe(text)
            lines.append(f"- [{heading}]({name}.md)" + (f": {about}" if about else ""))
    return "\n".join([*lines, ""])


def from_notebook(path: Path) -> str:
    """Return a notebook as Markdown, with the text outputs of its cells."""
    notebook: Any = nbformat.read(path, as_version=4)
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"^\{download\}.*\n", "", cell.source, flags=re.MULTILINE)
            parts.append(text.replace(".ipynb)", ".md)"))
            continue
        parts.append(f"```python\n{cell.source}\n```")
        outputs = [
            output.get("text") or output.get("data", {}).get("text/plain", "")
            for output in cell.get("outputs", [])
        ]
        if text := "".join(outputs).strip():
            parts.append(f"```text\n{text[:MAX_OUTPUT]}\n```")
    return "\n\n".join(parts)


def overview(texts: dict[str, str]) -> str:
    """Return llms.txt."""
    lines = [
        "# nearlinear",
        "",
        "> Sharded training of large models on PyTorch: MiCS, two-hop gradient synchronization, "
        "all kinds of parallelism, a planner, and a launcher. It has not run on a GPU yet.",
        "",
    ]
    for folder, title in SECTIONS.items():
        lines += [f"## {title}", ""]
        for name, text in texts.items():
            if TOP_LEVEL.get(name, name.partition("/")[0]) == folder:
                heading, about = describe(text)
                lines.append(f"- [{heading}]({name}.md)" + (f": {about}" if about else ""))
        lines.append("")
    return "\n".join(lines)


def describe(text: str) -> tuple[str, str]:
    """Return the title and the first sentence of a page."""
    title, about = "", ""
    for block in re.split(r"\n\s*\n", text):
        block = block.strip()
        if block.startswith("# "):
            title = title or block.splitlines()[0][2:]
        elif title and not re.match(r"[#!|<`\[:-]", block):
            about = re.split(r"(?<=\.)\s", " ".join(block.split()))[0]
            break
    return title, re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", about).rstrip(":")
