"""Render the benchmark tables of pages from measured files.

    python -m ci.benchmarks.tables            write the tables
    python -m ci.benchmarks.tables --check    exit 1 if a page does not match its files

A table stands between ``<!-- benchmark FILE.json -->`` and ``<!-- end -->``, below the command that
wrote the file. No number is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ci.benchmarks.compare import race, sweep
from ci.benchmarks.compare import report as compare_report
from ci.benchmarks.network.config import show_rate

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(<!-- benchmark (?P<name>\S+\.json) -->\n).*?(<!-- end -->)", re.DOTALL)

WIDTH = 96  # maximum line length of a command

Row = list[str]


@dataclass(frozen=True)
class Report:
    """A page and the measured files it shows."""

    page: Path
    folder: Path
    relative_folder: str
    """The folder as commands name it."""


REPORTS = [
    Report(ROOT / page, ROOT / folder, folder)
    for page, folder in (
        ("packages/core/docs/evidence/collectives.md", "packages/collectives/benchmarks"),
        ("ci/benchmarks/compare/README.md", "ci/benchmarks/compare/results"),
    )
]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.benchmarks.tables",
        description="Render the measured files of "
        f"{' and '.join(report.relative_folder for report in REPORTS)} into the page of "
        "each folder.",
    )
    parser.add_argument(
        "--check", action="store_true", help="only check; exit 1 if a page would change"
    )
    check = parser.parse_args(argv).check
    return max(_update(report, check) for report in REPORTS)


def _update(report: Report, check: bool) -> int:
    old = report.page.read_text(encoding="utf-8")
    try:
        new = render(old, report)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if new == old:
        print(f"{report.page.name} matches {report.relative_folder}")
        return 0
    if check:
        print(f"{report.page.name} does not match the measured files in {report.relative_folder}. "
              "Run python -m ci.benchmarks.tables.", file=sys.stderr)  # fmt: skip
        return 1
    report.page.write_text(new, encoding="utf-8")
    print(f"wrote {report.page.name}, the page of {report.relative_folder}")
    return 0


def render(text: str, report: Report) -> str:
    """Return the page with every block rendered.

    Raises:
        ValueError: If a file has no block, or a block no file or a different command.
    """
    shown = {match["name"] for match in BLOCK.finditer(text)}
    measured = {path.name for path in report.folder.glob("*.json")}
    if shown != measured:
        raise ValueError(
            f"files without a block in the page: {sorted(measured - shown)}; "
            f"blocks without a file: {sorted(shown - measured)}"
        )

    def block(match: re.Match) -> str:
        name = match["name"]
        record = json.loads((report.folder / name).read_text(encoding="utf-8"))
        written_to = f"--json {report.relative_folder}/{name}"
        if written_to not in record["command"]:
            raise ValueError(
                f"{name}: its command must contain {written_to}. Measure it again with that option."
            )
        return f"{match[1]}\n{_origin(record)}\n\n{_body(record)}\n\n{match[3]}"

    return BLOCK.sub(block, text)


def _origin(record: dict) -> str:
    """Return the command, the machine, the versions and the load by other programs."""
    lines = [""]
    for option in re.split(r" (?=--)", record["command"]):
        if lines[-1] and len(lines[-1]) + len(option) > WIDTH:
            lines.append("   ")
        lines[-1] += f" {option}"
    command = " \\\n".join(lines).removeprefix(" ")
    facts = record["machine"]
    parts = [
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB",
        ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
    ]
    if record.get("cores_used_by_others") is not None:
        parts.append(f"other programs kept {record['cores_used_by_others']:.2f} cores busy")
    return f"```sh\n{command}\n```\n\n{'; '.join(filter(None, parts))}."


def _body(record: dict) -> str:
    module = record["command"].split()[2]
    if module == "ci.benchmarks.mpi":
        return mpi(record)
    if module == "ci.benchmarks.network":
        return network(record)
    if module == "ci.benchmarks.compare":
        return compare_report.render_file(record)
    if module == "ci.benchmarks.compare.race":
        return race.render(record["runs"])
    if module == "ci.benchmarks.compare.sweep":
        return sweep.render(record["runs"])
    return steps(record) if "model" in record["results"][0] else collectives(record)


def collectives(record: dict) -> str:
    """Render a single-node benchmark: a table per pattern, a column per operation."""
    results = record["results"]
    labels = _values(results, "contender")
    ours, other = labels[0], labels[-1]
    parts = []
    for pattern in _values(results, "pattern"):
        chosen = [entry for entry in results if entry["pattern"] == pattern]
        operations = _values(chosen, "operation")
        table, ratios = [], {operation: [] for operation in operations}
        for size in sorted(_values(chosen, "bytes")):
            row = [_size(size)]
            for operation in operations:
                of = {e["contender"]: e["median_us"] for e in chosen
                      if (e["bytes"], e["operation"]) == (size, operation)}  # fmt: skip
                row.append(_pair(of.get(ours), of.get(other)))
                if ours in of and other in of:
                    ratios[operation].append(of[other] / of[ours])
            table.append(row)
        means = [f"**{_mean(ratios[operation]):.1f}x**" for operation in operations]
        table.append(["geometric mean", *means])
        parts.append(
            f"{results[0]['ranks']} ranks, pattern `{pattern}`: median microseconds per call, "
            f"{ours} / {other} (ratio).\n\n" + _markdown(["size", *operations], table)
        )
    return "\n\n".join(parts)


def steps(record: dict) -> str:
    """Render a training step benchmark (``--step``): a row per model and backend."""
    table = []
    for entry in record["results"]:
        same = [e for e in record["results"] if e["model"] == entry["model"]]
        base = next(e for e in same if e["contender"] == "gloo")["median_ms"]
        table.append([
            entry["model"], entry["contender"], f"{entry['median_ms']:.1f}",
            f"{entry['min_ms']:.1f}", f"{base / entry['median_ms']:.2f}x",
        ])  # fmt: skip
    head = ["parameters", "backend", "median ms", "fastest ms", "against gloo"]
    return f"{record['results'][0]['ranks']} ranks.\n\n{_markdown(head, table)}"


def mpi(record: dict) -> str:
    """Render `ci.benchmarks.mpi`: the engine and the fastest MPI at every size."""
    results, parts = record["results"], []
    for ranks in _values(results, "ranks"):
        chosen = [entry for entry in results if entry["ranks"] == ranks]
        operations, table = _values(chosen, "operation"), []
        for size in sorted(_values(chosen, "bytes")):
            row = [_size(size)]
            for operation in operations:
                of = {e["contender"]: e["median_us"] for e in chosen
                      if (e["bytes"], e["operation"]) == (size, operation)}  # fmt: skip
                peers = {name: us for name, us in of.items()
                         if name.partition(":")[0] not in ("engine", "memcpy")}  # fmt: skip
                best = min(peers, key=peers.get) if peers else None
                cell = _pair(of.get("engine"), peers.get(best))
                row.append(f"{cell} {best}" if best else cell)
            floor = _floor(chosen, size)
            table.append([*row, f"{100 * floor:.0f} %" if floor else "-"])
        parts.append(
            f"{ranks} ranks: median microseconds per call, the engine / the fastest MPI (ratio), "
            "and its name.\n\n" + _markdown(["size", *operations, "of the copy limit"], table)
        )
    return "\n\n".join(parts)


def _floor(results: list[dict], size: int) -> float | None:
    """Return the time of the fastest copies over the engine's, or None if not measured."""
    of = {e["contender"]: e["median_us"] for e in results
          if (e["bytes"], e["operation"]) == (size, "all_gather")}  # fmt: skip
    copies = [us for name, us in of.items() if name.partition(":")[0] == "memcpy"]
    return min(copies) / of["engine"] if copies and "engine" in of else None


def network(record: dict) -> str:
    """Render `ci.benchmarks.network`: a table per operation, a column per ranks per node."""
    settings, results = record["settings"], record["results"]
    labels, parts = _values(results, "contender"), []
    for operation in _values(results, "operation"):
        chosen = [entry for entry in results if entry["operation"] == operation]
        counts, table = _values(chosen, "ranks_per_node"), []

        def cells(of: Callable[[str, int], str], counts=counts) -> Row:
            return [" / ".join(of(label, count) for label in labels) for count in counts]

        for size in sorted(_values(chosen, "bytes_per_node")):
            used = {(e["contender"], e["ranks_per_node"]): e["link_used"] for e in chosen
                    if e["bytes_per_node"] == size}  # fmt: skip
            row = cells(lambda label, count, used=used: f"{100 * used[label, count]:.1f}")
            table.append([_size(size), *row])
        sent = {
            (label, count): max(e["sent_over_necessary"] for e in chosen
                                if (e["contender"], e["ranks_per_node"]) == (label, count))
            for label in labels for count in counts
        }  # fmt: skip
        row = cells(lambda label, count, sent=sent: f"{sent[label, count]:.2f}")
        table.append(["maximum bytes sent / necessary", *row])
        head = ["bytes per node", *(f"{n} rank{'s' * (n > 1)} per node" for n in counts)]
        rate = show_rate(settings["rate_bits_per_second"])
        parts.append(
            f"{operation}, {settings['nodes']} nodes, {rate} each: % link utilization, median, "
            f"{' / '.join(labels)}.\n\n{_markdown(head, table)}"
        )
    return "\n\n".join(parts)


def _pair(ours: float | None, other: float | None) -> str:
    if ours is None or other is None:
        return f"{_us(ours)} / {_us(other)}"
    return f"{_us(ours)} / {_us(other)} ({other / ours:.1f}x)"


def _us(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def _size(size: int) -> str:
    power = min(3, (size.bit_length() - 1) // 10)
    number = f"{size / 1024**power:.1f}".removesuffix(".0")
    return f"{number} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _mean(ratios: list[float]) -> float:
    """Return the geometric mean, or NaN without values."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def _values(results: Iterable[dict], key: str) -> list:
    """Return the distinct values of a field in order of appearance."""
    return list(dict.fromkeys(entry[key] for entry in results))


def _markdown(head: Row, rows: list[Row]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [head, *rows]]
    lines.insert(1, "|" + "|".join([":--", *["--:"] * (len(head) - 1)]) + "|")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
