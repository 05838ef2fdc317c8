"""Training results of every technique, bit for bit equal to those recorded in goldens.json."""

import json
import warnings

import pytest

from tests.core.goldens import runs


def differences(found: dict, recorded: dict, tolerances: dict[str, float] | None = None) -> dict:
    """The entries of ``found`` that differ from ``recorded``, as (found, recorded), by their path.

    With ``tolerances``, relative and by run, only losses are compared.
    """
    different = {}
    for name in sorted(found.keys() | recorded.keys()):
        here, there = found.get(name, {}), recorded.get(name, {})
        for key in sorted(here.keys() | there.keys()):
            pair = here.get(key), there.get(key)
            if tolerances is None:
                same = pair[0] == pair[1]
            elif key == "losses" and None not in pair:
                mine, theirs = ([float.fromhex(loss) for loss in losses] for losses in pair)
                same = mine == pytest.approx(theirs, rel=tolerances[name])
            else:
                same = None not in pair
            if not same:
                different[f"{name}.{key}"] = pair
    return different


@pytest.mark.slow
def test_every_technique_repeats_its_golden_run():
    recorded, here = json.loads(runs.GOLDENS.read_text()), runs.machine()
    tolerances = None
    if here != recorded["machine"]:
        tolerances = runs.TOLERANCES
        warnings.warn(
            f"goldens.json was recorded with {recorded['machine']} and this is {here}: losses are "
            f"compared to a relative tolerance of {min(tolerances.values()):g} (float32) to "
            f"{max(tolerances.values()):g} (lower precision), not bit for bit, and parameters, "
            "gradient norms, collectives and files are not compared",
            stacklevel=1,
        )
    different = differences(runs.compute_in_child(), recorded["runs"], tolerances)
    assert not different, "\n".join(
        f"{path}: found {found}, recorded {expected}"
        for path, (found, expected) in different.items()
    )


def test_a_last_bit_is_a_difference_except_on_another_machine():
    recorded = {"run": {"losses": [(4.7).hex()], "parameters": "0a"}}
    found = {"run": {"losses": [(4.7 + 1e-15).hex()], "parameters": "0b"}}
    assert set(differences(found, recorded)) == {"run.losses", "run.parameters"}
    assert not differences(found, recorded, {"run": 1e-4})
    assert set(differences({"run": {"losses": [(4.71).hex()]}}, recorded, {"run": 1e-4})) == {
        "run.losses",
        "run.parameters",
    }
    assert set(differences({}, recorded, {})) == {"run.losses", "run.parameters"}
