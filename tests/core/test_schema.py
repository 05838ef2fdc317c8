"""Strict dataclasses: what they refuse, in which words, and that TOML comes back as it went."""

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearlinear import schema
from nearlinear.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    """A table."""

    rate: float = 0.5
    """how fast"""
    mode: Literal["slow", "fast"] = "slow"
    """which way"""


@dataclass(frozen=True)
class Outer:
    """A config."""

    name: str = "x"
    """what it is called"""
    count: int = 1
    """how many"""
    on: bool = False
    """whether"""
    sizes: tuple[int, ...] = (1, 2)
    """several"""
    limit: int | None = None
    """at most"""
    inner: Inner = field(default_factory=Inner)
    """a table"""
    extra: dict = field(default_factory=dict)
    """anything"""


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"cuont": 3}, "'cuont': did you mean 'count'?"),
        ({"zzz": 3}, "known keys: count, extra"),
        ({"inner": {"rat": 3}}, r"'rat' in \[inner\]: did you mean 'rate'"),
        ({"count": "3"}, "count = '3': expected an integer"),
        ({"count": True}, "count = True: expected an integer"),
        ({"count": 2.5}, "count = 2.5: expected an integer"),
        ({"on": 1}, "on = 1: expected true or false"),
        ({"name": 1}, "name = 1: expected a text"),
        ({"inner": {"rate": "a"}}, "inner.rate = 'a': expected a number"),
        ({"inner": {"mode": "fas"}}, 'inner.mode = .*"slow", "fast" .did you mean .fast'),
        ({"inner": 3}, "inner = 3: expected a table"),
        ({"sizes": 3}, "sizes = 3: expected a list"),
        ({"sizes": [1, "b"]}, r"sizes\[1\] = 'b': expected an integer"),
        ({"limit": "b"}, "limit = 'b': expected an integer"),
        ({"extra": []}, "extra = .*expected a table"),
        (3, "the config = 3: expected a table"),
    ],
)
def test_a_mistake_names_key_value_and_remedy(data, words):
    with pytest.raises(ConfigError, match=words) as caught:
        schema.build(Outer, data)
    assert "\n" not in str(caught.value)


def test_numbers_are_read_kindly():
    built = schema.build(Outer, {"inner": {"rate": 1}, "count": 3.0, "limit": 4})
    assert built == Outer(inner=Inner(rate=1.0), count=3, limit=4)
    assert isinstance(built.count, int) and isinstance(built.inner.rate, float)


def test_a_key_without_default_is_asked_for():
    @dataclass(frozen=True)
    class Needs:
        path: str

    with pytest.raises(ConfigError, match="missing key path"):
        schema.build(Needs, {})


@given(
    st.builds(
        Outer,
        name=st.text(st.characters(codec="utf-8"), max_size=20),
        count=st.integers(-(2**40), 2**40),
        on=st.booleans(),
        sizes=st.lists(st.integers(0, 9), max_size=4).map(tuple),
        inner=st.builds(
            Inner,
            rate=st.floats(allow_nan=False, allow_infinity=False),
            mode=st.sampled_from(["slow", "fast"]),
        ),
        extra=st.dictionaries(st.text("ab.", min_size=1), st.integers() | st.text("xy")),
    )
)
def test_toml_comes_back_as_it_went(config):
    import tomllib

    assert schema.build(Outer, tomllib.loads(schema.to_toml(config))) == config


def test_toml_carries_the_docstrings():
    text = schema.to_toml(Outer())
    assert "count = 1  # how many" in text
    assert "[inner]" in text and "rate = 0.5  # how fast" in text
    assert "# limit = ...  # at most" in text


def test_settings_reach_into_tables():
    data = {"inner": {"rate": 1.0}}
    for setting in ("inner.rate=2e-3", "inner.mode=fast", "on=true", "sizes=[4, 5]", "name=a b"):
        schema.assign(data, setting)
    assert schema.build(Outer, data) == Outer(
        name="a b", on=True, sizes=(4, 5), inner=Inner(2e-3, "fast")
    )


@pytest.mark.parametrize("setting", ["noequals", "=3", "a..b=3"])
def test_a_setting_needs_a_key_and_a_value(setting):
    with pytest.raises(ConfigError, match="expected key=value"):
        schema.assign({}, setting)


def test_a_setting_cannot_enter_a_value():
    with pytest.raises(ConfigError, match="'count' is a value"):
        schema.assign({"count": 3}, "count.x=1")


def test_files(tmp_path):
    (tmp_path / "a.toml").write_text('name = "n"')
    (tmp_path / "a.json").write_text('{"name": "n"}')
    (tmp_path / "bad.toml").write_text("a = 1\nname = \n")
    (tmp_path / "a.yaml").write_text("")
    assert schema.read(tmp_path / "a.toml") == schema.read(tmp_path / "a.json") == {"name": "n"}
    with pytest.raises(ConfigError, match=r"bad\.toml: not valid TOML.*line 2"):
        schema.read(tmp_path / "bad.toml")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ConfigError, match="not a table"):
        schema.read(tmp_path / "list.json")
    with pytest.raises(ConfigError, match="not UTF-8"):
        schema.read(tmp_path / "latin.toml")
    with pytest.raises(ConfigError, match="no such config file"):
        schema.read(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"\.toml or \.json"):
        schema.read(tmp_path / "a.yaml")
