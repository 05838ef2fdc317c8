"""Build hooks: include ``data_prep``, which ``nearlinear data`` runs, and set the URLs.

In the repository ``data_prep`` is two folders up; in a source distribution it is beside this file.
``NEARLINEAR_REPOSITORY`` is the address of the repository in the metadata.
"""

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class IncludeDataPrep(BuildHookInterface):
    """Add ``data_prep`` to wheels and source distributions."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Set the included files of one build; an editable install finds them by its path."""
        if version == "editable":
            return
        root = Path(self.root)
        source = root if (root / "data_prep").is_dir() else root.parents[1]
        build_data["force_include"][str(source / "data_prep")] = "data_prep"


class ProjectUrls(MetadataHookInterface):
    """Set the project's URLs, which depend on the place of publication."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the URLs to the metadata."""
        if repository := os.environ.get("NEARLINEAR_REPOSITORY"):
            metadata["urls"] = {
                "Repository": repository,
                "Changelog": f"{repository}/blob/main/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
