"""Fixtures of the collectives' tests: one pool of rank processes per test module."""

import pytest

from tests.collectives.ranks import Pool


@pytest.fixture(scope="session")
def compiled():
    """Compile the package's libraries before any rank has to wait for the compiler."""
    from nearlinear_collectives import backend

    backend.find_glue()


@pytest.fixture(scope="module")
def pool(compiled):
    """Up to 8 rank processes, reused by the tests of a module."""
    pool = Pool()
    yield pool
    pool.close()
