"""Import of the modules of other libraries from nearlinear, by a finder on ``sys.meta_path``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ALIASES = {
    "smdistributed.modelparallel.torch": "nearlinear.compat.smp",
    "torch.sagemaker": "nearlinear.compat.tsm",
    "smdistributed.dataparallel.torch": "nearlinear.compat.smddp",
    "transformer_engine.pytorch": "nearlinear.compat.tsm.transformer_engine",
    "transformer_engine.common.recipe": "nearlinear.compat.tsm.transformer_engine",
}
"""Modules of other libraries, with all submodules, and the modules that take their place."""

VERSIONS = {"smdistributed.modelparallel": "1.15.0", "smdistributed.dataparallel": "2.6.0"}
"""Last releases of the libraries, which scripts print or compare."""


class AliasFinder(MetaPathFinder):
    """Finds the modules of ``aliases`` and the empty packages around them."""

    def __init__(self, aliases: dict[str, str]):
        self.aliases = aliases
        parts = [name.split(".") for name in aliases]
        names = {".".join(part[:depth]) for part in parts for depth in range(1, len(part))}
        self.packages = {name for name in names if _find(name) is None}
        """Packages that exist only to contain an alias."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an alias or of a package around one, or None."""
        if fullname in self.packages:
            return ModuleSpec(fullname, _PackageLoader(), is_package=True)
        real = self.real_name(fullname)
        if real is None or _find(real) is None:
            return None
        return ModuleSpec(fullname, _AliasLoader(real), is_package=True)

    def real_name(self, name: str) -> str | None:
        """Return the name of the module that takes the place of module ``name``."""
        for alias, real in self.aliases.items():
            if name == alias or name.startswith(f"{alias}."):
                return real + name.removeprefix(alias)
        return None


class _AliasLoader(Loader):
    """Returns a module that has another name."""

    def __init__(self, real: str):
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.real)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has overwritten it


class _PackageLoader(Loader):
    """Creates an empty package."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
        if module.__name__ in VERSIONS:
            vars(module)["__version__"] = VERSIONS[module.__name__]


def install(aliases: dict[str, str] = ALIASES) -> AliasFinder:
    """Provide the modules of ``aliases`` to later imports, except those that are installed.

    Example::

        import nearlinear_compat

        nearlinear_compat.install()
        import smdistributed.modelparallel.torch as smp
    """
    for finder in sys.meta_path:
        if isinstance(finder, AliasFinder):
            return finder
    missing = {alias: real for alias, real in aliases.items() if _find(alias) is None}
    finder = AliasFinder(missing)
    sys.meta_path.insert(0, finder)
    return finder


def _find(name: str) -> ModuleSpec | None:
    """Return the spec of module ``name``, or None if it or a package around it is missing."""
    try:
        return importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        return None
