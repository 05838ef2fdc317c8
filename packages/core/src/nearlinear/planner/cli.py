"""Command ``nearlinear plan``: predict a config on machines that need not be available."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config.train import TrainConfig
    from .cluster import Cluster
    from .result import PlanResult

EXAMPLES = """\
examples:
  nearlinear plan run.toml --cluster p4d.24xlarge:32             time, rates, memory, bottleneck
  nearlinear plan run.toml --cluster p5.48xlarge:16 --tokens 300e9    days and cost of 300 billion
  nearlinear plan run.toml --cluster p4d.24xlarge:32 --explain   each setting and its alternatives
  nearlinear plan run.toml --cluster p4d.24xlarge:32 --search    the fastest layouts that fit
  nearlinear plan run.toml --cluster p4d.24xlarge:32 --search --explain --write best.toml
  nearlinear plan run.toml --cluster h100:8 --search --export megatron   options of Megatron-LM
  nearlinear plan run.toml --cluster p4d.24xlarge:2 --scale      up to 16,384 GPUs, simulated
  nearlinear plan run.toml --cluster p4d.24xlarge:32 --dry-run   memory, from a real step
  nearlinear plan run.toml --cluster h100:4 --figure step.png --json step.json
  nearlinear plan --validate --figure validation.png             error against published runs
  nearlinear plan --blind runs.csv                               error against your own table
"""


DOES_NOT_FIT = 1
"""Exit code of ``nearlinear plan`` for a config that does not fit on its cluster."""


@dataclass(frozen=True)
class PlanOptions:
    """Options of ``nearlinear plan``."""

    cluster: str = ""
    tokens: float = 0.0
    straggler: float | None = None
    price_per_hour: float | None = None
    json: str = ""
    """File for all numbers (.json)."""
    explain: bool = False
    search: bool = False
    write: str = ""
    """File for the config of the fastest layout (.toml)."""
    export: str = ""
    """Library to print the layout for, a key of `export.TOOLS`."""
    scale: bool = False
    dry_run: bool = False
    validate: bool = False
    blind: str = ""
    """Table of runs to predict (.csv)."""
    figure: str = ""
    """File for the timeline, or for predicted against published times (.png)."""


def add_commands(
    commands: Any, load: Callable[[argparse.Namespace], TrainConfig]
) -> list[argparse.ArgumentParser]:
    """Add ``plan``, and its deprecated alias ``advise``, to the commands of ``nearlinear``.

    ``load`` returns the config of the parsed options.
    """
    plan = commands.add_parser(
        "plan",
        help="predict memory, speed and cost of a config, without a cluster",
        description="Predict a training step on machines that need not be available: time by "
        "stream, tokens per second, MFU, memory, days, cost and the bottleneck. Nothing is "
        "allocated. The exit code is 1 if the config does not fit. Nodes: p3dn, p4d, p4de, p5, "
        "p5e, p5en, p6-b200, p6-b300 by their EC2 names, and a100-40gb, a100-80gb, h100, h200, "
        "b200, b300, gb200, gb300 (racks of 72); or a file of nearlinear tune --machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_arguments(plan)
    add = plan.add_argument
    add(
        "--explain",
        "--why",
        action="store_true",
        dest="explain",
        help="compare each setting with its alternatives; with --search, of the fastest layout",
    )
    add("--search", action="store_true", help="rank layouts of the same global batch")
    add("--scale", action="store_true", help="predict scaling up to 16,384 GPUs")
    add(
        "--dry-run",
        action="store_true",
        help="measure memory in a step of the real code on fake tensors (about a minute)",
    )
    add("--validate", action="store_true", help="print the error against published runs")
    add(
        "--blind",
        metavar="FILE",
        default="",
        help="print the error against a table of runs, and a hash of the predictions, which do not "
        "depend on the table's values",
    )
    add("--figure", default="", metavar="FILE", help="draw the timeline or validation (.png)")
    plan.set_defaults(run=lambda options, arguments: _plan(options, load))
    advise = commands.add_parser(
        "advise",
        help="deprecated: use plan --search --explain",
        description="Deprecated alias of nearlinear plan --search --explain.",
    )
    _add_arguments(advise)
    advise.set_defaults(
        run=lambda options, arguments: _plan(options, load),
        explain=True,
        search=True,
        scale=False,
        dry_run=False,
        validate=False,
        blind="",
        figure="",
    )
    return [plan, advise]


def _add_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--cluster", default="", metavar="NODE:N", help="node type and number; or FILE.toml:N")
    add("--tokens", type=float, default=0.0, metavar="N", help="tokens to train on")
    add("--straggler", type=float, metavar="X",
        help="standard deviation of a rank's time over its mean; default: as fitted")  # fmt: skip
    add("--price-per-hour", type=float, metavar="X", help="price of one node, USD")
    add("--json", default="", metavar="FILE", help="write all numbers (.json)")
    add("--write", default="", metavar="FILE", help="write the fastest layout's config (.toml)")
    add("--export", default="", metavar="LIBRARY",
        help="print the layout for torchtitan, megatron or deepspeed")  # fmt: skip


def _plan(options: argparse.Namespace, load: Callable[[argparse.Namespace], TrainConfig]) -> int:
    values = {each.name: getattr(options, each.name) for each in fields(PlanOptions)}
    return run_plan(load(options), PlanOptions(**values), options.config or "")


def run_plan(config: TrainConfig, options: PlanOptions, source: str = "") -> int:
    """Print the plan of ``config``, read from the file ``source``, and return the exit code.

    The code is 1 if the config does not fit; with ``search``, if no layout of it fits.

    Raises ConfigError and NearlinearError.
    """
    from ..output import check_output_file

    check_output_file("--figure", options.figure, ".png")
    check_output_file("--json", options.json, ".json")
    check_output_file("--write", options.write, ".toml", source)
    if options.write and not options.search:
        raise ConfigError("--write needs --search: it writes the config of the fastest layout")
    if options.export:
        from .export import check_tool

        check_tool(options.export)
    if options.blind:
        return _predict_blind(options)
    if options.validate:
        return _validate(options)
    try:
        result = _plan_layout(config, options)
        print(result)
    except ConfigError as error:
        if not options.search:
            raise
        result = _plan_other_layout(config, options, error)
        print(f"the config's own layout cannot be planned: {error}")
    numbers = result.as_dict()
    try:
        _print_details(result, options, numbers)
    finally:  # keep the numbers, also if a search finds nothing
        _write_json(options.json, numbers)
    if options.figure:
        _draw(lambda plots: plots.save_step_streams(result.step, options.figure))
    return 0 if result.fits or options.search else DOES_NOT_FIT


def _plan_layout(
    config: TrainConfig,
    options: PlanOptions,
    cluster: Cluster | None = None,
    vocabulary: int = 0,
) -> PlanResult:
    from .api import plan

    return plan(
        config,
        cluster or options.cluster,
        tokens=options.tokens,
        vocabulary=vocabulary,
        straggler=options.straggler,
        usd_per_hour=options.price_per_hour,
    )


def _plan_other_layout(config: TrainConfig, options: PlanOptions, error: ConfigError) -> PlanResult:
    """Plan any layout of the config's batch. Raises ``error`` if there is none."""
    from .api import cluster_of
    from .search import first_layout

    layout = first_layout(config, cluster_of(options.cluster, config))
    if layout is None:
        raise error
    return _plan_layout(layout, options)


def _print_details(result: PlanResult, options: PlanOptions, numbers: dict[str, Any]) -> None:
    """Print the optional parts, and add them to ``numbers``."""
    if not result.fits and not options.search:
        from .explain import suggest_fit

        print(suggest_fit(result))
    if options.dry_run:
        from .dry_run import measure

        measured = measure(result.config, result.cluster.world)
        print(f"\nmeasured in a step of the real code on fake tensors:\n{measured}")
        numbers["dry_run"] = measured.as_dict()
    explained = result
    if options.search:
        explained = _search(result, options, numbers)
    if options.explain:
        from .explain import explain, format_explanations

        found = explain(explained)
        print("\n" + format_explanations(found, explained))
        numbers["explain"] = [each.as_dict() for each in found]
    if options.export:
        from .export import export

        print("\n" + export(explained, options.export))
    if options.scale:
        from .api import format_scaling, scaling_curve

        points = scaling_curve(result.config, result.cluster, reference=result)
        print("\n" + format_scaling(points))
        numbers["scaling"] = [vars(point) for point in points]


def _search(result: PlanResult, options: PlanOptions, numbers: dict[str, Any]) -> PlanResult:
    """Print the fastest layouts, write the best config, and return its plan."""
    import dataclasses

    from ..config import schema
    from ..output import write_output_file
    from .search import format_candidates, search

    candidates = search(result.config, result.cluster, reference=result)
    print("\n" + format_candidates(candidates, result.cluster))
    numbers["search"] = [
        {"seconds": each.seconds, "memory_bytes": each.memory, **each.changes}
        for each in candidates
    ]
    best = candidates[0].config
    if options.cluster:  # so that the file plans for the same cluster
        place = dataclasses.replace(best.plan, cluster=options.cluster)
        best = dataclasses.replace(best, plan=place)
    write_output_file(options.write, schema.to_toml(best))
    return _plan_layout(best, options, result.cluster, result.work.shape.vocabulary)


def _validate(options: PlanOptions) -> int:
    from .validate import validate

    found = validate()
    print(found)
    _write_json(options.json, found.as_dict())
    if options.figure:
        _draw(lambda plots: plots.save_predicted_against_published(found, options.figure))
    return 0


def _predict_blind(options: PlanOptions) -> int:
    from .validate import score_blind

    found = score_blind(Path(options.blind))
    print(found)
    _write_json(options.json, found.as_dict())
    return 0


def _write_json(path: str, numbers: dict[str, Any]) -> None:
    from ..output import write_output_file

    write_output_file(path, json.dumps(numbers, indent=1) + "\n")


def _draw(save: Callable[[Any], Any]) -> None:
    from ..errors import NearlinearError

    try:
        from .. import plots

        print(f"drew {save(plots)}")
    except ModuleNotFoundError as error:
        raise NearlinearError(
            f'{error.name} is required for figures. Run pip install "nearlinear[notebooks]".'
        ) from None
    except OSError as error:
        raise ConfigError(f"the figure cannot be written ({error.strerror})") from None
