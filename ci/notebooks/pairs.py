"""Keep each notebook's .ipynb equal to its source, a .py file in jupytext's percent format.

The .ipynb is written without outputs and with cell ids derived from content, so that the bytes are
reproducible and diffs show changed cells only.
"""

import hashlib
from pathlib import Path

import jupytext
import nbformat
import papermill

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
SYNC = "python -m ci.notebooks --sync"


def select(folder: Path, only: list[str]) -> list[str]:
    """Return the sorted stems of the notebooks in `folder` that start with any of `only`.

    Raises:
        ValueError: If there are no notebooks, or none matches a prefix.
    """
    found = {
        path.stem for suffix in ("py", "ipynb") for path in folder.glob(f"[0-9][0-9]_*.{suffix}")
    }
    if not found:
        raise ValueError(f"No notebooks: {folder} contains no NN_name.ipynb.")
    for start in only:
        if not any(stem.startswith(start) for stem in found):
            raise ValueError(
                f"--only {start}: no such notebook. Choose from: {', '.join(sorted(found))}."
            )
    return sorted(stem for stem in found if not only or stem.startswith(tuple(only)))


def from_script(script: Path) -> str:
    """Return the text of the .ipynb for a percent script."""
    notebook = jupytext.read(script, fmt="py:percent")
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        cell["id"] = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    notebook.metadata = nbformat.from_dict(
        {
            "jupytext": {"formats": "ipynb,py:percent"},
            "kernelspec": KERNELSPEC,
            "language_info": {"name": "python"},
        }
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def sync(folder: Path, stem: str) -> bool:
    """Write `stem`.ipynb from `stem`.py and return True if it changed."""
    script, path = folder / f"{stem}.py", folder / f"{stem}.ipynb"
    if not script.exists():
        raise ValueError(f"{path.name} has no .py file. Create it: jupytext --to py:percent {path}")
    text = from_script(script)
    if path.exists() and path.read_text() == text:
        return False
    path.write_text(text)
    return True


def faults(folder: Path, stem: str) -> list[tuple[str, str]]:
    """Return the faults of a notebook's two files, each with its fix."""
    script, path = folder / f"{stem}.py", folder / f"{stem}.ipynb"
    to_script = f"jupytext --to py:percent {path}"
    if not path.exists():
        return [("there is a .py but no .ipynb", SYNC)]
    if not script.exists():
        return [("there is an .ipynb but no .py", to_script)]
    notebook = nbformat.read(path, as_version=4)
    found = []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if any(cell.outputs for cell in code):
        found.append(("the .ipynb contains outputs", SYNC))
    if any(cell.execution_count is not None for cell in code):
        found.append(("the .ipynb contains execution counts", SYNC))
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append(("the .ipynb's kernelspec is not python3", SYNC))
    first = notebook.cells[0] if notebook.cells else None
    if first is None or first.cell_type != "markdown" or not first.source.startswith("# "):
        fix = f"begin {script.name} with a markdown cell: # %% [markdown], then # # Title"
        found.append(("does not begin with a markdown title", fix))
    if any("plt.show()" in cell.source for cell in code):
        fix = f"in {script.name}: nearlinear.plots.show(alt=...) instead of plt.show()"
        found.append(("a figure has no alternative text", fix))
    if "scale" not in parameters(path):
        fix = f'in {script.name}: # %% tags=["parameters"], then scale = "ci"  # ci or laptop'
        found.append(("has no cell tagged `parameters` that sets `scale`", fix))
    fresh = nbformat.reads(from_script(script), as_version=4)
    if contents(fresh) != contents(notebook):
        fix = f"{SYNC}  (keeps the .py); if the edits are in the .ipynb: {to_script}"
        found.append(("the .py and the .ipynb differ", fix))
    elif not found and from_script(script) != path.read_text():
        found.append(("the .ipynb's cell ids or metadata differ from those of --sync", SYNC))
    return found


def contents(notebook) -> list[tuple]:
    return [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells]


def parameters(path: Path) -> dict:
    notebook = nbformat.read(path, as_version=4)
    if notebook.metadata.get("kernelspec", {}).get("language") != "python":
        return {"scale": None}  # papermill cannot read it; the kernelspec is reported
    return papermill.inspect_notebook(str(path))
