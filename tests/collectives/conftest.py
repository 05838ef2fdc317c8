"""Ranks for the collectives' tests: one pool of processes per test module."""

import pytest

from tests.collectives.ranks import Pool


@pytest.fixture(scope="session")
def compiled():
    """The libraries of the package, before any rank has to wait for a compiler."""
    from nearlinear_collectives import backend

    backend.glue()


@pytest.fixture(scope="module")
def pool(compiled):
    """Up to 8 rank processes, kept warm over the tests of a module."""
    pool = Pool()
    yield pool
    pool.close()
