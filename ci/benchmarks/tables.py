"""The benchmark tables of the collectives' and the race's README, rendered from measured files.

    python -m ci.benchmarks.tables            write the tables anew
    python -m ci.benchmarks.tables --check    exit 1 if a README is not in step with its files

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

from ci.benchmarks.network.plan import show_rate
from ci.race import sweep
from ci.race import table as race

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(<!-- benchmark (?P<name>\S+\.json) -->\n).*?(<!-- end -->)", re.DOTALL)

WIDTH = 96  # of a command's lines

Row = list[str]


@dataclass(frozen=True)
class Book:
    """A README and the folder of the files it shows; ``said``: how commands name that folder."""

    readme: Path
    folder: Path
    said: str


BOOKS = [
    Book(ROOT / package / "README.md", ROOT / package / folder, f"{package}/{folder}")
    for package, folder in (("packages/collectives", "benchmarks"), ("ci/race", "results"))
]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.benchmarks.tables",
        description=f"Render the files of {', '.join(book.said for book in BOOKS)} into the README "
        "beside each folder.",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it would")
    check = parser.parse_args(argv).check
    return max(_renew(book, check) for book in BOOKS)


def _renew(book: Book, check: bool) -> int:
    old = book.readme.read_text(encoding="utf-8")
    try:
        new = render(old, book)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if new == old:
        print(f"the tables beside {book.said} are those of the measured files")
        return 0
    if check:
        print(f"the tables beside {book.said} are not those of the measured files: run "
              "python -m ci.benchmarks.tables", file=sys.stderr)  # fmt: skip
        return 1
    book.readme.write_text(new, encoding="utf-8")
    print(f"the README beside {book.said} is written")
    return 0


def render(text: str, book: Book) -> str:
    """The README with every block written anew; ValueError for a file without block or command."""
    shown = {match["name"] for match in BLOCK.finditer(text)}
    measured = {path.name for path in book.folder.glob("*.json")}
    if shown != measured:
        raise ValueError(
            f"files without a block in the README: {sorted(measured - shown)}; "
            f"blocks without a file: {sorted(shown - measured)}"
        )

    def block(match: re.Match) -> str:
        name = match["name"]
        record = json.loads((book.folder / name).read_text(encoding="utf-8"))
        written_to = f"--json {book.said}/{name}"
        if written_to not in record["command"]:
            raise ValueError(f"{name}: its command must say {written_to}; measure it again so")
        return f"{match[1]}\n{_origin(record)}\n\n{_body(record)}\n\n{match[3]}"

    return BLOCK.sub(block, text)


def _origin(record: dict) -> str:
    """The command, and what a reader must know of the machine and of that hour."""
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
    if module == "ci.race":
        return race.whole(record)
    if module == "ci.race.sweep":
        return sweep.render(record["races"])
    return steps(record) if "model" in record["results"][0] else collectives(record)


def collectives(record: dict) -> str:
    """`nearlinear_collectives.bench`: a table per pattern, a column per operation."""
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
    """`nearlinear_collectives.bench --step`: a row per model and backend."""
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
    """`ci.benchmarks.mpi`: the engine beside the fastest MPI at every size."""
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
            "and which that is.\n\n" + _markdown(["size", *operations, "of the copy limit"], table)
        )
    return "\n\n".join(parts)


def _floor(results: list[dict], size: int) -> float | None:
    """An all-gather's fastest copies over the engine's time; None where they were not measured."""
    of = {e["contender"]: e["median_us"] for e in results
          if (e["bytes"], e["operation"]) == (size, "all_gather")}  # fmt: skip
    copies = [us for name, us in of.items() if name.partition(":")[0] == "memcpy"]
    return min(copies) / of["engine"] if copies and "engine" in of else None


def network(record: dict) -> str:
    """`ci.benchmarks.network`: a table per operation, a column per number of ranks per node."""
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
        table.append(["bytes sent / necessary, at most", *row])
        head = ["bytes per node", *(f"{n} rank{'s' * (n > 1)} per node" for n in counts)]
        rate = show_rate(settings["rate_bits_per_second"])
        parts.append(
            f"{operation}, {settings['nodes']} nodes, {rate} each: % of the link used, median, "
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
    """Geometric; NaN where nothing was compared."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def _values(results: Iterable[dict], key: str) -> list:
    """The different values of a field, in their order of appearance."""
    return list(dict.fromkeys(entry[key] for entry in results))


def _markdown(head: Row, rows: list[Row]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [head, *rows]]
    lines.insert(1, "|" + "|".join([":--", *["--:"] * (len(head) - 1)]) + "|")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
