"""Build hooks: compile the engine (seconds, without torch) into the wheel; set the project's URLs.

``NEARLINEAR_COLLECTIVES_PLATFORM`` names the platform of a cross-compiled wheel, for which ``CXX``
must be a compiler: ``python -m ci.wheels`` sets both. ``NEARLINEAR_REPOSITORY`` is the address of
the repository in the metadata.
"""

import importlib.util
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PACKAGE = "nearlinear_collectives"
MACHINES = ("x86_64", "aarch64")


class CompileEngine(BuildHookInterface):
    """Compile the engine and include its library."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the engine for one wheel and set the wheel's tag."""
        if version == "editable":
            return  # sources may change, so the engine is compiled on first use
        platform, machine = target_platform()
        build = load_build_module(Path(self.root) / "src" / PACKAGE / "build" / "__init__.py")
        self.scratch = tempfile.TemporaryDirectory(prefix="nearlinear-wheel-")
        library = Path(self.scratch.name) / build.SHIPPED.name
        try:
            build.build_engine(library, portable=machine is not None)
        except build.BuildError as error:
            self.app.abort(f"{PACKAGE} needs a C++ compiler to be installed from source.\n{error}")
        stamp = library.with_suffix(".hash")
        stamp.write_text(build.sources_hash(build.engine_sources(), machine))
        for file in (library, stamp):
            build_data["force_include"][str(file)] = f"{PACKAGE}/lib/{file.name}"
        # The library has a C interface, so one wheel serves every Python on this platform.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the compiled files."""
        if version != "editable":
            self.scratch.cleanup()


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


def target_platform() -> tuple[str, str | None]:
    """Return the platform tag of the wheel, and the machine of a cross-compiled one."""
    chosen = os.environ.get("NEARLINEAR_COLLECTIVES_PLATFORM")
    if not chosen:
        return sysconfig.get_platform().replace("-", "_").replace(".", "_"), None
    machine = next((each for each in MACHINES if chosen.endswith(f"_{each}")), None)
    if machine is None:
        raise ValueError(
            f"NEARLINEAR_COLLECTIVES_PLATFORM={chosen!r} must end with one of "
            f"{', '.join(f'_{each}' for each in MACHINES)}, as in manylinux_2_28_x86_64"
        )
    return chosen, machine


def load_build_module(path: Path):
    spec = importlib.util.spec_from_file_location("nearlinear_collectives_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
