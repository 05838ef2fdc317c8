"""Scripts of this folder, imported as modules with nearlinear-compat's finder installed."""

import importlib.util
import sys
from pathlib import Path

import pytest

import nearlinear as nl
import nearlinear_compat

SCRIPTS = Path(__file__).parent / "scripts"


def load_script(name):
    """Import a script. Ranks that are threads build their models one at a time."""
    nearlinear_compat.install()
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    create = getattr(module, "create_model", None)
    if create is not None:

        def create_locked(*args, **options):
            with nl.spmd.one_at_a_time():
                return create(*args, **options)

        module.create_model = create_locked
    return module


@pytest.fixture(scope="session")
def train_gpt2():
    return load_script("train_gpt2")


@pytest.fixture(scope="session")
def interface():
    return load_script("interface")


@pytest.fixture
def finder():
    """Remove the finder and its modules from the import system afterwards."""
    path, modules = list(sys.meta_path), set(sys.modules)
    sys.meta_path[:] = [each for each in path if type(each).__name__ != "AliasFinder"]
    yield
    sys.meta_path[:] = path
    for name in set(sys.modules) - modules:
        if name.split(".")[0] == "smdistributed":
            del sys.modules[name]
