"""Scripts of this folder, imported as modules with nearlinear-compat's finder installed."""

import importlib.util
import sys
from pathlib import Path

import pytest

import nearlinear as nl
import nearlinear_compat
from nearlinear_compat.finder import AliasFinder

SCRIPTS = Path(__file__).parent / "scripts"


def load_script(name):
    """Import a script. Ranks that are threads build their models one at a time."""
    nearlinear_compat.install()
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for key in [key for key in vars(module) if key.startswith("create_")]:
        setattr(module, key, _locked(getattr(module, key)))
    return module


def _locked(create):
    def create_locked(*args, **options):
        with nl.spmd.one_at_a_time():
            return create(*args, **options)

    return create_locked


@pytest.fixture(scope="session")
def train_gpt2():
    return load_script("train_gpt2")


@pytest.fixture(scope="session")
def interface():
    return load_script("interface")


@pytest.fixture
def finder():
    """Import system without a finder and its modules, as in a new process."""
    path = list(sys.meta_path)
    known = {name: each for name, each in sys.modules.items() if _is_alias(name)}
    sys.meta_path[:] = [each for each in path if not isinstance(each, AliasFinder)]
    for name in known:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if _is_alias(name)]:
        del sys.modules[name]
    sys.modules.update(known)
    sys.meta_path[:] = path


def _is_alias(name):
    return name.split(".")[0] in ("smdistributed", "transformer_engine")
