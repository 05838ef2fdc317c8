"""Config dataclasses: strict validation, error messages, and TOML round trips."""

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearlinear.config import schema
from nearlinear.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    """Nested table."""

    rate: float = 0.5
    """learning rate"""
    mode: Literal["slow", "fast"] = "slow"
    """speed mode"""


@dataclass(frozen=True)
class Outer:
    """Config with a field of every supported type."""

    name: str = "x"
    """run name"""
    count: int = 1
    """number of items"""
    on: bool = False
    """enable the feature"""
    sizes: tuple[int, ...] = (1, 2)
    """sizes of the items"""
    limit: int | None = None
    """maximum number of items"""
    inner: Inner = field(default_factory=Inner)
    """nested table"""
    extra: dict = field(default_factory=dict)
    """free-form table"""


@pytest.mark.parametrize(
    ("data", "message"),
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
def test_invalid_data_names_key_value_and_remedy(data, message):
    with pytest.raises(ConfigError, match=message) as caught:
        schema.build(Outer, data)
    assert "\n" not in str(caught.value)


def test_integral_floats_and_integers_convert_to_field_type():
    built = schema.build(Outer, {"inner": {"rate": 1}, "count": 3.0, "limit": 4})
    assert built == Outer(inner=Inner(rate=1.0), count=3, limit=4)
    assert isinstance(built.count, int) and isinstance(built.inner.rate, float)


def test_missing_required_key_raises():
    @dataclass(frozen=True)
    class Required:
        path: str

    with pytest.raises(ConfigError, match="missing key path"):
        schema.build(Required, {})


@given(
    st.builds(
        Outer,
        name=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
        count=st.integers(-(2**40), 2**40),
        on=st.booleans(),
        sizes=st.lists(st.integers(0, 9), max_size=4).map(tuple),
        inner=st.builds(
            Inner,
            rate=st.floats(allow_nan=False, allow_infinity=False),
            mode=st.sampled_from(["slow", "fast"]),
        ),
        extra=st.dictionaries(
            st.text("ab.", min_size=1), st.integers(-(2**62), 2**62) | st.text("xy")
        ),
    )
)
def test_toml_round_trip_preserves_config(config):
    import tomllib

    assert schema.build(Outer, tomllib.loads(schema.to_toml(config))) == config


def test_toml_contains_field_docstrings_as_comments():
    text = schema.to_toml(Outer())
    assert "count = 1  # number of items" in text
    assert "[inner]" in text and "rate = 0.5  # learning rate" in text
    assert "# limit = ...  # maximum number of items" in text


def test_assign_sets_nested_keys():
    data = {"inner": {"rate": 1.0}}
    for setting in ("inner.rate=2e-3", "inner.mode=fast", "on=true", "sizes=[4, 5]", "name=a b"):
        schema.assign(data, setting)
    assert schema.build(Outer, data) == Outer(
        name="a b", on=True, sizes=(4, 5), inner=Inner(2e-3, "fast")
    )


@pytest.mark.parametrize("setting", ["noequals", "=3", "a..b=3"])
def test_assign_without_key_or_value_raises(setting):
    with pytest.raises(ConfigError, match="expected key=value"):
        schema.assign({}, setting)


def test_assign_below_a_non_table_raises():
    with pytest.raises(ConfigError, match="'count' is a value"):
        schema.assign({"count": 3}, "count.x=1")


def test_read_parses_toml_and_json_and_rejects_other_files(tmp_path):
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
