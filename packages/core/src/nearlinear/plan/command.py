"""``nearlinear plan``: answer, and write what was asked for."""

import dataclasses
import json
from dataclasses import dataclass

from .. import outputs, schema
from ..errors import ConfigError, NearlinearError
from . import advise, answer, remedy, scaling, search, validate


@dataclass(frozen=True)
class Asked:
    """What the command line says of every plan beside the config."""

    cluster: str = ""
    tokens: float = 0.0
    straggler: float | None = None
    price_per_hour: float | None = None
    json: str = ""
    """where to write all numbers"""


@dataclass(frozen=True)
class Options(Asked):
    """What it says of ``nearlinear plan`` alone."""

    why: bool = False
    search: bool = False
    scale: bool = False
    dry_run: bool = False
    validate: bool = False
    figure: str = ""
    """where to draw the timeline, or predicted against published (.png)"""


def run(config, options: Options) -> int:
    """Print the answer for ``config``. Raises ConfigError and NearlinearError."""
    outputs.check("--figure", options.figure, ".png")
    outputs.check("--json", options.json, ".json")
    if options.validate:
        return _validate(options)
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
        trial = advise.Trial.of(
            found,
            tokens=options.tokens,
            straggler=options.straggler,
            usd_per_hour=options.price_per_hour,
        )
        decisions = advise.why(trial, found)
        print("\n" + advise.why_text(decisions, found))
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


def advise_on(config, asked: Asked, write: str = "", source: str = "") -> int:
    """``nearlinear advise``: walk the checklist from ``config``, the file ``source``, on.

    Raises ConfigError.
    """
    outputs.check("--json", asked.json, ".json")
    outputs.check("--write", write, ".toml", source)
    walked = advise.advise(
        config,
        asked.cluster,
        tokens=asked.tokens,
        straggler=asked.straggler,
        usd_per_hour=asked.price_per_hour,
    )
    advised = walked.config
    if asked.cluster:  # so that the file is planned and trained where it was asked for
        place = dataclasses.replace(advised.plan, cluster=asked.cluster)
        advised = dataclasses.replace(advised, plan=place)
    print(f"{walked}\n\n{advise.settings(advised)}")
    _write(asked.json, advise.as_dict(walked))
    outputs.write(write, schema.to_toml(advised))
    return 0


def _validate(options: Options) -> int:
    found = validate.validate()
    print(found)
    _write(options.json, found.as_dict())
    if options.figure:
        _draw(lambda plots: plots.save_predicted_against_published(found, options.figure))
    return 0


def _write(path: str, numbers: dict) -> None:
    outputs.write(path, json.dumps(numbers, indent=1) + "\n")


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
