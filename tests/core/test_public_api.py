"""Public names: static for editors, lazy at run time, deprecated for one release."""

import ast
import warnings
from pathlib import Path

import pytest

import nearlinear as nl

TREE = ast.parse(Path(nl.__file__).read_text(encoding="utf-8"))


def static_exports() -> dict[str, str]:
    """Module of each name imported under TYPE_CHECKING, as type checkers read them."""
    found = {}
    for node in TREE.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.body:
                assert isinstance(statement, ast.ImportFrom)
                found |= {alias.asname: statement.module or "" for alias in statement.names}
    return found


def test_static_and_lazy_exports_are_equal():
    assert static_exports() == nl._EXPORTS
    assert set(nl.__all__) == {"__version__", *nl._EXPORTS}
    assert set(nl.__all__) <= set(dir(nl))


@pytest.mark.parametrize("name", sorted(nl.__all__))
def test_public_name_resolves_and_is_documented(name):
    value = getattr(nl, name)
    assert value is not None
    if name not in ("__version__",):
        assert (value.__doc__ or "").strip(), f"nl.{name} has no docstring"


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        nl.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", sorted(nl._DEPRECATED))
def test_deprecated_name_warns_and_names_its_replacement(name):
    assert name not in nl.__all__
    with pytest.warns(DeprecationWarning, match=rf"nearlinear.{name} is deprecated: use "):
        value = getattr(nl, name)
    assert value is not None


def test_public_names_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in nl.__all__:
            getattr(nl, name)
