"""Build hook of the wheel: compile the engine (seconds, without torch) and include its library."""

import importlib.util
import sysconfig
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "nearlinear_collectives"


class CompileEngine(BuildHookInterface):
    def initialize(self, version, build_data):
        if version == "editable":
            return  # sources may change, so the engine is compiled on first use
        build = load_build_module(Path(self.root) / "src" / PACKAGE / "build" / "__init__.py")
        self.scratch = tempfile.TemporaryDirectory(prefix="nearlinear-wheel-")
        library = Path(self.scratch.name) / build.SHIPPED.name
        try:
            build.build_engine(library)
        except build.BuildError as error:
            self.app.abort(f"{PACKAGE} needs a C++ compiler to be installed from source.\n{error}")
        stamp = library.with_suffix(".hash")
        stamp.write_text(build.sources_hash(build.engine_sources()))
        for file in (library, stamp):
            build_data["force_include"][str(file)] = f"{PACKAGE}/lib/{file.name}"
        # The library has a C interface, so one wheel serves every Python on this platform.
        build_data["pure_python"] = False
        build_data["tag"] = (
            f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        )

    def finalize(self, version, build_data, artifact_path):
        if version != "editable":
            self.scratch.cleanup()


def load_build_module(path: Path):
    spec = importlib.util.spec_from_file_location("nearlinear_collectives_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
