"""Build hook: include the text pipeline ``data_prep``, which ``nearlinear data`` runs.

In the repository ``data_prep`` is two folders up; in a source distribution it is beside this file.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class IncludeDataPrep(BuildHookInterface):
    """Add ``data_prep`` to wheels and source distributions."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Set the included files of one build; an editable install finds them by its path."""
        if version == "editable":
            return
        root = Path(self.root)
        source = root if (root / "data_prep").is_dir() else root.parents[1]
        build_data["force_include"][str(source / "data_prep")] = "data_prep"
