"""Metadata hook: ``NEARLINEAR_REPOSITORY`` is the address of the repository in the metadata."""

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


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
