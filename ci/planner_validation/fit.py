"""Fit the planner's constants to published runs: ``python -m ci.planner_validation.fit``.

The fit minimizes the logarithm of predicted over published step times by Gauss-Newton steps, with
each constant mapped to its bounds by a logistic function. The loss is Huber's: large errors count
linearly. A source is weighted by the fourth root of its number of runs, so that the longest table
does not dominate. A weak prior keeps constants without evidence near their expected values.

The fit is repeated without each source; its errors on that source estimate the error on unseen
sources. All fits start from the expected values. The runs of ``held_out.csv`` are only evaluated.
"""

import argparse
import math
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from nearlinear.planner import fitted_constants, validate
from nearlinear.planner.fitted_constants import BOUNDS, EXPECTED, FittedConstants
from nearlinear.planner.published.runs import PublishedRun, held_out_runs, published_runs
from nearlinear.planner.step_time import step_time

HUBER_THRESHOLD = 0.1  # larger errors count linearly
STEP = 0.02  # finite difference of the logistic variable
PRIOR_WEIGHT = 0.005  # keeps constants without evidence near their expected values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="Gauss-Newton steps (default: 8)")
    parser.add_argument(
        "--no-left-out", action="store_true", help="do not repeat the fit without each source"
    )
    options = parser.parse_args()
    runs = published_runs()
    start = FittedConstants(**EXPECTED)
    sources = [] if options.no_left_out else list(dict.fromkeys(run.source for run in runs))
    remaining = [[run for run in runs if run.source != source] for source in sources]
    samples = [runs, *remaining]
    with ProcessPoolExecutor() as pool:
        fits = pool.map(fit, samples, [start] * len(samples), [options.rounds] * len(samples))
        fitted, *others = fits
    without = dict(zip(sources, others, strict=True))
    errors, held_out = (_error_summary(each, fitted) for each in (runs, held_out_runs()))
    text = fitted_constants.to_toml(fitted, without, errors, held_out)
    fitted_constants.FILE.write_text(text, encoding="utf-8")
    print(f"wrote {fitted_constants.FILE}")


def _error_summary(runs: list[PublishedRun], fitted: FittedConstants) -> dict[str, float]:
    found = validate.summarize_errors(validate.score(runs, fitted))
    return {"runs": found.count, "median": found.median, "ninetieth": found.ninetieth}


def fit(runs: list[PublishedRun], start: FittedConstants, rounds: int) -> FittedConstants:
    """Fit the constants to ``runs``, starting from ``start``."""
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.source] = counts.get(run.source, 0) + 1
    weights = np.array([counts[run.source] ** -0.375 for run in runs])
    expected = _logits(FittedConstants(**EXPECTED))
    logits, damping = _logits(start), 1.0
    errors = _errors(runs, logits)
    for _ in range(rounds):
        slope = np.stack(
            [
                (_errors(runs, logits + step_vector) - errors) / STEP
                for step_vector in _difference_steps()
            ]
        )
        soft = weights * np.sqrt(
            np.minimum(1.0, HUBER_THRESHOLD / np.maximum(np.abs(errors), 1e-9))
        )
        left = (slope * soft**2) @ slope.T
        right = -(slope * soft**2) @ errors - PRIOR_WEIGHT * (logits - expected)
        while damping < 1e6:
            size = damping * np.diag(left).clip(1e-3) + PRIOR_WEIGHT
            move = np.linalg.solve(left + np.diag(size), right)
            tried, away = _errors(runs, logits + move), logits - expected
            if _cost(tried, weights, away + move) < _cost(errors, weights, away):
                logits, errors, damping = logits + move, tried, damping / 4
                break
            damping *= 4
        else:
            break
    return _parameters(logits)


def _cost(errors, weights, away) -> float:
    size = np.abs(errors)
    huber = np.where(
        size < HUBER_THRESHOLD, size**2 / 2, HUBER_THRESHOLD * (size - HUBER_THRESHOLD / 2)
    )
    return float((weights**2 * huber).sum() + PRIOR_WEIGHT * (away**2).sum() / 2)


def _errors(runs: list[PublishedRun], logits) -> np.ndarray:
    fitted = _parameters(logits)
    return np.array(
        [math.log(step_time(run.work, run.cluster, fitted).seconds / run.value) for run in runs]
    )


def _difference_steps() -> np.ndarray:
    return STEP * np.eye(len(BOUNDS))


def _parameters(logits) -> FittedConstants:
    share = 1 / (1 + np.exp(-logits))
    values = {
        name: float(low + s * (high - low))
        for (name, (low, high)), s in zip(BOUNDS.items(), share, strict=True)
    }
    return FittedConstants(**values)


def _logits(fitted: FittedConstants) -> np.ndarray:
    share = np.array(
        [(getattr(fitted, name) - low) / (high - low) for name, (low, high) in BOUNDS.items()]
    ).clip(0.01, 0.99)
    return np.log(share / (1 - share))


if __name__ == "__main__":
    main()
