"""``nearlinear plan``: answer, and write what was asked for."""

import json
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, NearlinearError
from . import advise, answer, remedy, scaling, search, validate


@dataclass(frozen=True)
class Options:
    """What the command line says beside the config."""

    cluster: str = ""
    tokens: float = 0.0
    straggler: float | None = None
    price_per_hour: float | None = None
    why: bool = False
    search: bool = False
    scale: bool = False
    dry_run: bool = False
    validate: bool = False
    figure: str = ""
    """where to draw the timeline, or predicted against published (.png)"""
    json: str = ""
    """where to write all numbers"""


def run(config, options: Options) -> int:
    """Print the answer for ``config``. Raises ConfigError and NearlinearError."""
    for flag, path, suffix in (
        ("--figure", options.figure, ".png"),
        ("--json", options.json, ".json"),
    ):
        if path and Path(path).suffix != suffix:
            raise ConfigError(f"{flag} {path}: the file's name must end in {suffix}")
    if options.validate:
        return _validate(options)
    if not options.cluster:
        raise ConfigError(
            "--cluster is missing: name the machines, as in --cluster p4d.24xlarge:32"
        )
    found = answer.plan(
        config,
        options.cluster,
        tokens=options.tokens,
        straggler=options.straggler,
        usd_per_hour=options.price_per_hour,
    )
    print(found)
    numbers = found.as_dict()
    try:
        _more(found, options, numbers)
    finally:  # what is known by then is kept, also where a search finds nothing
        _write(options.json, numbers)
    if options.figure:
        _draw(lambda plots: plots.save_step_streams(found.step, options.figure))
    return 0


def _more(found: answer.Plan, options: Options, numbers: dict) -> None:
    """What was asked for beside the answer, printed and added to ``numbers``."""
    if not found.fits:
        print(remedy.remedy(found))
    if options.dry_run:
        from .dry_run import measure

        seen = measure(found.config, found.cluster.world)
        print(f"\nby a step of the real code on tensors without memory:\n{seen}")
        numbers["dry_run"] = seen.as_dict()
    if options.why:
        print("\n" + advise.text(advise.advise(found)))
    if options.search:
        layouts = search.search(found.config, found.cluster, like=found)
        print("\n" + search.text(layouts, found.cluster))
        numbers["search"] = [
            {"seconds": each.seconds, "memory_bytes": each.memory, **each.changes}
            for each in layouts
        ]
    if options.scale:
        points = scaling.curve(found.config, found.cluster, like=found)
        print("\n" + scaling.text(points))
        numbers["scaling"] = [vars(point) for point in points]


def _validate(options: Options) -> int:
    found = validate.validate()
    print(found)
    _write(options.json, found.as_dict())
    if options.figure:
        _draw(lambda plots: plots.save_predicted_against_published(found, options.figure))
    return 0


def _write(path: str, numbers: dict) -> None:
    if not path:
        return
    try:
        Path(path).write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})") from None
    print(f"wrote {path}")


def _draw(save) -> None:
    try:
        from .. import plots

        print(f"drew {save(plots)}")
    except ModuleNotFoundError as error:
        raise NearlinearError(
            f'{error.name} is missing: pip install "nearlinear[notebooks]" to draw'
        ) from None
    except OSError as error:
        raise ConfigError(f"the figure cannot be written ({error.strerror})") from None
