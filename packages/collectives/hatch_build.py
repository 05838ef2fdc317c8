"""The wheel's build step: compile the engine (seconds, no torch) and ship its library."""

import importlib.util
import sysconfig
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileEngine(BuildHookInterface):
    def initialize(self, version, build_data):
        path = Path(self.root) / "src" / "nearlinear_collectives" / "build.py"
        spec = importlib.util.spec_from_file_location("nearlinear_collectives_build", path)
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        build.ship_engine()
        # The library has a plain C interface: one wheel serves every Python on this platform.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
