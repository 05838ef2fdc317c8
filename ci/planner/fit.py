"""Fit the planner's few parameters to published runs: ``python -m ci.planner.fit``.

Least squares of the logarithm of predicted over published step times, by Gauss-Newton steps on
parameters that a logistic function keeps within their bounds; large errors count by their size, not
its square (Huber). A source counts by the fourth root of its number of rows, so that the longest
table does not decide alone; what no run tells stays near what was expected beforehand. Each source
is left out once, and the fit repeated: what those parameters say of it is what to expect of a
source that nobody fitted. All fits start from what was expected; the runs of ``held_out.csv`` are
only counted, at the end.
"""

import argparse
import math
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from nearlinear.plan import parameters, published, validate
from nearlinear.plan.parameters import BOUNDS, EXPECTED, Parameters
from nearlinear.plan.published import Run
from nearlinear.plan.step import step

LARGE = 0.1  # errors beyond count linearly
NUDGE = 0.02  # of the finite differences, in the logistic variable
PULL = 0.005  # towards what was expected, so that what no row tells stays put


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--rounds", type=int, default=8, help="Gauss-Newton steps (8)")
    asked.add_argument("--no-left-out", action="store_true", help="do not repeat without a source")
    options = asked.parse_args()
    runs = published.runs()
    start = Parameters(**EXPECTED)
    sources = [] if options.no_left_out else list(dict.fromkeys(run.source for run in runs))
    rests = [[run for run in runs if run.source != source] for source in sources]
    several = [runs, *rests]
    with ProcessPoolExecutor() as pool:
        fits = pool.map(fit, several, [start] * len(several), [options.rounds] * len(several))
        fitted, *others = fits
    without = dict(zip(sources, others, strict=True))
    errors, held_out = (_found(each, fitted) for each in (runs, published.held_out()))
    text = parameters.to_toml(fitted, without, errors, held_out)
    parameters.FILE.write_text(text, encoding="utf-8")
    print(f"wrote {parameters.FILE}")


def _found(runs: list[Run], fitted: Parameters) -> dict[str, float]:
    found = validate.errors(validate.score(runs, fitted))
    return {"runs": found.count, "median": found.median, "ninetieth": found.ninetieth}


def fit(runs: list[Run], start: Parameters, rounds: int) -> Parameters:
    """The parameters that bring ``runs`` closest, from ``start`` on."""
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.source] = counts.get(run.source, 0) + 1
    weights = np.array([counts[run.source] ** -0.375 for run in runs])
    expected = _places(Parameters(**EXPECTED))
    place, damping = _places(start), 1.0
    errors = _errors(runs, place)
    for _ in range(rounds):
        slope = np.stack([(_errors(runs, place + nudge) - errors) / NUDGE for nudge in _nudges()])
        soft = weights * np.sqrt(np.minimum(1.0, LARGE / np.maximum(np.abs(errors), 1e-9)))
        left = (slope * soft**2) @ slope.T
        right = -(slope * soft**2) @ errors - PULL * (place - expected)
        while damping < 1e6:
            size = damping * np.diag(left).clip(1e-3) + PULL
            move = np.linalg.solve(left + np.diag(size), right)
            tried, away = _errors(runs, place + move), place - expected
            if _cost(tried, weights, away + move) < _cost(errors, weights, away):
                place, errors, damping = place + move, tried, damping / 4
                break
            damping *= 4
        else:
            break
    return _parameters(place)


def _cost(errors, weights, away) -> float:
    size = np.abs(errors)
    huber = np.where(size < LARGE, size**2 / 2, LARGE * (size - LARGE / 2))
    return float((weights**2 * huber).sum() + PULL * (away**2).sum() / 2)


def _errors(runs: list[Run], place) -> np.ndarray:
    fitted = _parameters(place)
    return np.array(
        [math.log(step(run.work, run.cluster, fitted).seconds / run.seconds) for run in runs]
    )


def _nudges() -> np.ndarray:
    return NUDGE * np.eye(len(BOUNDS))


def _parameters(place) -> Parameters:
    share = 1 / (1 + np.exp(-place))
    values = {
        name: float(low + s * (high - low))
        for (name, (low, high)), s in zip(BOUNDS.items(), share, strict=True)
    }
    return Parameters(**values)


def _places(fitted: Parameters) -> np.ndarray:
    share = np.array(
        [(getattr(fitted, name) - low) / (high - low) for name, (low, high) in BOUNDS.items()]
    ).clip(0.01, 0.99)
    return np.log(share / (1 - share))


if __name__ == "__main__":
    main()
