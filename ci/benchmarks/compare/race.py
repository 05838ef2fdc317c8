"""The fastest system at every memory budget, over clusters, link rates, accumulation and models.

Every run compares all systems at several settings each. A system is within a budget if its measured
peak of allocated tensors is; budgets are multiples of P, the size of the float32 parameters. So one
run gives a cell for each budget. The nine runs are an orthogonal array: every pair of a cluster, a
rate and an accumulation occurs once.

All systems together need more memory than a small machine has. So a run has heats and a final: each
heat measures some of the systems, once; the final has the fastest of the heats within every budget,
ours and others, in turn. Ratios are those of the final.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ci.benchmarks.collectives import record as bench_record
from ci.command_line import make_parser
from ci.emulation.cluster import exit_status

from . import report, traffic
from .__main__ import report_deviations
from .config import CompareConfig
from .peers import PeerMissing
from .run import run_comparison
from .sweep import gigabits
from .systems import SYSTEMS

MODULE = "ci.benchmarks.compare.race"
BUDGETS = (3.0, 4.25, 5.0, 6.0)
"""Peaks of allocated tensors in sizes of the float32 parameters."""
IN_A_HEAT = 18
"""Most systems that are held in memory at a time."""
FINALISTS = 2
"""Systems of each side that a budget sends to the final."""
LONGEST_TRANSFER = 30.0
"""Seconds of transfer alone in a step beyond which a system is left out of a run."""
CLUSTERS = ({"nodes": 4}, {"nodes": 2, "ranks_per_node": 2}, {"nodes": 3, "shard": 3})
RATES, ACCUMULATIONS = ("100mbit", "1gbit", "10gbit"), (1, 4, 8)
MODELS = ({}, {"model": "llama", "layers": 9})
OURS = ("ours", "ours_once", "ours_whole", "ours_nl", "ours_nl_once", "ours_nl_lean",
        "ours_nl_full", "ours_nl_full_lean", "ours_nl_full_budget", "ours_nl_whole",
        "ours_nl_sliced")  # fmt: skip
OTHERS = ("ddp", "ddp_nl", "ddp_zero", "ddp_zero_nl", "zero1", "zero2", "zero3", "fsdp2",
          "fsdp2_nl", "fsdp2_ahead", "fsdp2_ahead_nl", "fsdp2_once", "fsdp2_once_nl",
          "fsdp2_once_ahead", "fsdp2_once_ahead_nl", "hybrid", "hybrid_nl", "hybrid_once",
          "hybrid_once_nl", "fsdp1", "fsdp1_nl", "fsdp1_once", "fsdp1_once_nl", "mics",
          "hpz")  # fmt: skip
EXAMPLES = f"""\
examples:
  python -m {MODULE} --json race.json --figures figures    all runs; continues an unfinished file
  python -m {MODULE} --json race.json --runs 0 4           the first and the fifth
  python -m {MODULE} --json race.json --runs               only the tables of the file"""


def run_configs(steps: int) -> list[CompareConfig]:
    """Return the configuration of every run."""
    configs = []
    for first in range(3):
        for second in range(3):
            cluster, rate = CLUSTERS[first], RATES[second]
            accumulation = ACCUMULATIONS[(first + second) % 3]
            model = MODELS[(first + second) % 2]
            base = CompareConfig((), rate=rate, accumulation=accumulation, memory=True)
            config = replace(base, steps=steps, **cluster, **model)
            configs.append(replace(config, systems=("compute", *contestants(config))).validate())
    return configs


def heats_and_final(config: CompareConfig, earlier: list[dict]) -> list[dict]:
    """Run the systems of ``config`` in heats and the fastest in a final; return all records.

    ``earlier`` records of the run replace a heat of their systems. The records of heats are marked
    ``heat``, and untimed where a final follows.
    """
    compute = config.systems[0]
    names = _missing(config, earlier)
    parts = math.ceil(len(names) / IN_A_HEAT)
    heats = [earlier] if earlier else []
    steps = config.steps if earlier else 1  # heats of other days are compared by the computation
    for part in range(parts):
        heat = replace(config, systems=(compute, *names[part::parts]), steps=steps)
        heats.append(run_comparison(heat))
    records = [record for heat in heats for record in heat]
    finalists = choose_finalists(config, heats)
    print(f"# final: {', '.join(finalists)}", flush=True)
    for record in records:
        record["heat"] = True
        record["timed"] = record["timed"] and record["system"] not in finalists
    return records + run_comparison(replace(config, systems=tuple(finalists), memory=False))


def _missing(config: CompareConfig, records: list[dict]) -> list[str]:
    """Return the systems of ``config``, without the computation, that have no ``records``."""
    measured = {record["system"] for record in records}
    return [name for name in config.systems[1:] if name not in measured]


def choose_finalists(config: CompareConfig, heats: list[list[dict]]) -> list[str]:
    """Return the computation and the fastest systems of the heats within each budget.

    Each budget sends `FINALISTS` systems of each side, on every backend and on gloo. The times of a
    heat are divided by that of its computation, since the machine is not always equally fast.
    """
    compute = config.systems[0]
    seconds, peaks = {}, {}
    for records in heats:
        medians = report.step_medians(records)
        seconds |= {name: each / medians[compute] for name, each in medians.items()}
        peaks |= report.peaks_in_parameters(config, records)
    chosen = {compute}
    for names in (OURS, OTHERS):
        for backends in (names, [name for name in names if "_nl" not in name]):
            for budget in BUDGETS:
                fitting = [name for name in backends if peaks.get(name, math.inf) <= budget]
                chosen.update(sorted(fitting, key=seconds.__getitem__)[:FINALISTS])
    return [name for name in config.systems if name in chosen]


def contestants(config: CompareConfig) -> Iterator[str]:
    """Yield the systems that differ on a run's cluster, without hopeless transfers."""
    for name in (*OURS, *OTHERS):
        differs = SYSTEMS[name].differs(config)
        if differs and transfer_seconds(config, name) <= LONGEST_TRANSFER:
            yield name


def transfer_seconds(config: CompareConfig, name: str) -> float:
    """Return the least seconds that a step's bytes take on a NIC."""
    counts = SYSTEMS[name].traffic
    assert counts is not None
    return 8 * traffic.minimum_bytes(config, counts(config)) / (1e9 * gigabits(config.rate))


@dataclass(frozen=True)
class Cell:
    """The fastest systems of a run within a memory budget."""

    run: int
    budget: float
    """In sizes of the parameters."""
    ours: str | None
    other: str | None
    ratio: float
    """Speed of ours relative to the fastest other system; nan if one of them does not exist."""
    gathered_fits: bool
    """True if a system that gathers every unit once per step is within the budget."""


def cells(runs: list[dict], gloo_only: bool = False) -> list[Cell]:
    """Return the cells of all runs, of systems on every backend or on gloo only."""
    found = []
    for number, run in enumerate(runs):
        config = CompareConfig.from_fields(run["config"])
        seconds = report.step_medians([r for r in run["results"] if not r.get("heat")])
        peaks = report.peaks_in_parameters(config, run["results"])
        for budget in BUDGETS:
            fitting = [name for name in seconds if peaks.get(name, math.inf) <= budget]
            if gloo_only:
                fitting = [name for name in fitting if "_nl" not in name]
            best = [min((n for n in fitting if n in names), key=seconds.__getitem__, default=None)
                    for names in (OURS, OTHERS)]  # fmt: skip
            ratio = seconds[best[1]] / seconds[best[0]] if best[0] and best[1] else math.nan
            once = any(max(SYSTEMS[name].traffic(config).gathers) <= 1
                       for name in fitting if SYSTEMS[name].traffic)  # fmt: skip
            found.append(Cell(number, budget, *best, ratio, once))
    return found


def render(runs: list[dict]) -> str:
    """Return Markdown tables of all cells, with geometric means of the ratios."""
    parts = []
    for gloo_only, backends in ((False, "every backend"), (True, "gloo only")):
        rows = [[backends, "budget", "ours", "s/step", "fastest other", "s/step", "speed-up"],
                [":--", "--:", ":--", "--:", ":--", "--:", "--:"]]  # fmt: skip
        found = cells(runs, gloo_only)
        for cell in found:
            run = runs[cell.run]
            config = CompareConfig.from_fields(run["config"])
            seconds = report.step_medians(run["results"])
            shown = [report.title(config), f"{cell.budget:g} P"]
            for name in (cell.ours, cell.other):
                shown += [SYSTEMS[name].title, f"{seconds[name]:.2f}"] if name else ["none", ""]
            rows.append([*shown, "" if math.isnan(cell.ratio) else f"{cell.ratio:.2f}x"])
        parts.append(report.markdown(rows))
        for words, chosen in (
            ("all cells", found),
            ("cells in which the gathered model does not fit",
             [cell for cell in found if not cell.gathered_fits]),
        ):  # fmt: skip
            ratios = [cell.ratio for cell in chosen if not math.isnan(cell.ratio)]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                parts.append(f"Geometric mean over {words} ({len(ratios)}): {mean:.2f}x, smallest "
                             f"{min(ratios):.2f}x.")  # fmt: skip
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    return exit_status(lambda: _race(options, argv), PeerMissing)


def _race(options, argv: list[str]) -> int:
    record = bench_record.header(MODULE, argv, "torch", "nearlinear-collectives", "deepspeed")
    record["runs"] = json.loads(options.json.read_text())["runs"] if options.json.exists() else []
    configs = run_configs(options.steps)
    wanted = range(len(configs)) if options.runs is None else options.runs
    for config in (configs[number] for number in wanted):
        run = next((run for run in record["runs"] if _settings(
            CompareConfig.from_fields(run["config"])) == _settings(config)), None)  # fmt: skip
        earlier = run["results"] if run else []
        if earlier and not _missing(config, earlier):
            continue
        print(f"# {report.describe(config)}", flush=True)
        left_out = [name for name in (*OURS, *OTHERS) if name not in config.systems]
        print(f"# left out: {', '.join(left_out) or 'none'}", flush=True)
        results = heats_and_final(config, earlier)
        if run is None:
            record["runs"].append(run := {})
        run.update(config=asdict(config), results=results)
        bench_record.write(options.json, record)
        print(f"\n{report.render(config, results)}\n", flush=True)
    print(render(record["runs"]))
    if options.figures:
        options.figures.mkdir(parents=True, exist_ok=True)
        report.save(report.plot_fronts(record["runs"], OURS), options.figures / "race.svg")
    return max((report_deviations(run["results"]) for run in record["runs"]), default=0)


def _settings(config: CompareConfig) -> CompareConfig:
    """Return a run's settings without its systems, of which a later version may have more."""
    return replace(config, systems=())


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(MODULE, __doc__, EXAMPLES)
    add = parser.add_argument
    add("--runs", type=int, nargs="*", metavar="N", help="numbers of runs, from 0 (default: all)")
    add("--steps", type=int, default=3, metavar="K", help="timed steps of each system (default: 3)")
    add(
        "--json",
        type=Path,
        required=True,
        metavar="FILE",
        help="read and write all records; runs that lack systems are completed",
    )
    add("--figures", type=Path, metavar="FOLDER", help="write the figure as SVG")
    return parser


if __name__ == "__main__":
    sys.exit(main())
