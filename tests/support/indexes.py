"""Edit the index of a checkpoint, and seal it again, as somebody with write access could."""

import json
from collections.abc import Callable
from pathlib import Path

from nearlinear.checkpoint import index, index_schema, sealed_json


def edit_index(folder: Path, change: Callable[[dict], object]) -> None:
    """Apply ``change`` to the data of an index, and write it with a matching hash of itself."""
    path = Path(folder) / index.NAME
    data = json.loads(path.read_text())
    change(data)
    version = data.pop("format")
    data.pop("sha256", None)
    path.write_bytes(sealed_json.seal(version, data))


def update_hash(folder: Path, path: Path) -> None:
    """Store the current size and hash of the file ``path`` in the index."""
    found = index.hash_file(path)
    entry = {"bytes": found.bytes, "sha256": found.sha256}
    edit_index(folder, lambda data: data["files"].update({path.name: entry}))


def binding(folder: Path) -> dict[str, str]:
    """Return the metadata that bind a safetensors file to the index in ``folder``."""
    return {index_schema.BINDING: index.read(folder).content}


def bind_files(folder: Path) -> None:
    """Rewrite the files of a checkpoint so that they belong to its edited index."""
    from safetensors.torch import load_file, save_file

    for path in sorted(Path(folder).glob("*.safetensors")):
        save_file(load_file(path), path, {"format": "pt", **binding(folder)})
        update_hash(folder, path)
