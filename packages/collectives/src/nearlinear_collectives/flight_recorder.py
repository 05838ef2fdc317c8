"""Explain a failed job: which operation did not complete, and which rank is behind.

    NEARLINEAR_COLLECTIVES_TRACE=/shared/trace_ torchrun ... train.py
    python -m nearlinear_collectives.flight_recorder /shared/trace_

After its first failed operation, a rank writes its last 256 operations to a file whose name is
``/shared/trace_`` and the rank. A rank that is stuck outside of a collective writes none.
"""

from __future__ import annotations

import argparse
import glob
import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

MESSAGES = ("send", "receive")
SIGNATURE = ("operation", "count", "dtype", "reduce", "root")

Dump = dict[str, Any]
"""A file: ``rank``, ``groups`` (global ranks by name) and ``operations`` as of `trace`."""


def read_dumps(prefix: str) -> dict[int, Dump]:
    """Return the files of all ranks by rank.

    Raises:
        FileNotFoundError: No file begins with ``prefix``.
        ValueError: A file is not complete.
    """
    found = {}
    for path in sorted(glob.glob(f"{glob.escape(prefix)}[0-9]*")):
        try:
            dump = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not a complete trace: {error}") from None
        found[dump["rank"]] = dump
    if not found:
        raise FileNotFoundError(
            f"no file begins with {prefix}: was NEARLINEAR_COLLECTIVES_TRACE set on the ranks, and "
            "did an operation fail?"
        )
    return found


def explain(dumps: dict[int, Dump]) -> list[str]:
    """Return lines on the first incomplete operation of every group, and on open messages."""
    groups = {name: ranks for dump in dumps.values() for name, ranks in dump["groups"].items()}
    lines = [line for name, ranks in groups.items() for line in _explain_group(name, ranks, dumps)]
    for rank, dump in sorted(dumps.items()):
        lines += [
            f"rank {rank}, group {each['group']}: {_text(each)} is {each['state']} {each['detail']}"
            for each in dump["operations"]
            if each["operation"] in MESSAGES and each["state"] != "done"
        ]
    return lines or ["every recorded operation is done"]


def _explain_group(name: str, ranks: list[int], dumps: dict[int, Dump]) -> list[str]:
    calls = {
        rank: {
            each["sequence"]: each
            for each in dumps[rank]["operations"]
            if each["group"] == name and each["operation"] not in MESSAGES
        }
        for rank in ranks
        if rank in dumps
    }
    every = sorted({number for own in calls.values() for number in own})
    oldest = max((min(own) for own in calls.values() if own), default=0)  # that all remember
    incomplete = [
        number
        for number in every
        if number >= oldest
        and any(own.get(number, {"state": ""})["state"] != "done" for own in calls.values())
    ]
    if not incomplete:
        return []
    number = incomplete[0]
    called = [own[number] for own in calls.values() if number in own]
    signatures = [_signature(each) for each in called]
    usual = max(called, key=lambda each: signatures.count(_signature(each)))
    lines = [f"group {name} of ranks {ranks}: {_text(usual)} is incomplete"]
    for rank in ranks:
        if rank not in calls:
            lines.append(f"  rank {rank}: no file; it is stuck elsewhere, or has ended")
        elif number not in calls[rank]:
            last = max(calls[rank], default=None)
            told = f"its last is {_text(calls[rank][last])}" if last is not None else "nor another"
            lines.append(f"  rank {rank}: has not called it; {told}")
        else:
            own = calls[rank][number]
            other = "" if _signature(own) == _signature(usual) else f"called {_text(own)} instead; "
            lines.append(f"  rank {rank}: {other}{own['state']} {own['detail']}".rstrip())
    return lines


def _signature(call: dict[str, Any]) -> tuple:
    return tuple(call[key] for key in SIGNATURE)


def _text(call: dict[str, Any]) -> str:
    text = f"{call['operation']} #{call['sequence']}"
    return (
        text if call["operation"] == "barrier" else f"{text} of {call['count']} x {call['dtype']}"
    )


# --- torch's own analyzer ------------------------------------------------------------------------


def write_for_torch(dumps: dict[int, Dump], folder: Path) -> None:
    """Write ``folder/trace_RANK``, which ``torchfrtrace`` reads.

    That tool knows the operations of some libraries only, so these are given as gloo's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank, dump in dumps.items():
        config = {
            name: {"name": name, "desc": name, "ranks": str(ranks)}
            for name, ranks in dump["groups"].items()
        }
        entries = [
            _torch_entry(index, each, dump["groups"][each["group"]], rank)
            for index, each in enumerate(dump["operations"])
        ]
        content = {"version": "2.10", "pg_config": config, "entries": entries}
        (folder / f"trace_{rank}").write_bytes(pickle.dumps(content))


def _torch_entry(index: int, call: dict[str, Any], ranks: list[int], rank: int) -> dict[str, Any]:
    name, size, count = call["operation"].removeprefix("uneven "), len(ranks), call["count"]
    message = name in MESSAGES
    me = ranks.index(rank)
    if message:
        arrow = f"send {me}->{call['root']}" if name == "send" else f"recv {me}<-{call['root']}"
    now = time.time_ns() - int(1000 * call["microseconds_ago"])
    done = call["state"] == "done"
    return {
        "record_id": index,
        "pg_id": 0,
        "process_group": (call["group"], call["group"]),
        "collective_seq_id": 0 if message else call["sequence"],
        "p2p_seq_id": call["sequence"] if message else 0,
        "op_id": index,
        "is_p2p": message,
        "profiling_name": f"gloo:{arrow if message else name}",
        "time_created_ns": now,
        "input_sizes": [[count * (size if name == "reduce_scatter" else 1)]],
        "output_sizes": [[count * (size if name == "all_gather" else 1)]],
        "input_dtypes": [call["dtype"]],
        "output_dtypes": [call["dtype"]],
        "state": "completed" if done else "started",
        "time_discovered_started_ns": now,
        "time_discovered_completed_ns": now + int(1000 * call["microseconds"]) if done else None,
        "retired": done,
        "timeout_ms": 0,
        "frames": [],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nearlinear_collectives.flight_recorder",
        description="Explain a failed job from the files of its ranks, which they write if "
        "NEARLINEAR_COLLECTIVES_TRACE is set to the start of their path.",
        epilog="example: python -m nearlinear_collectives.flight_recorder /shared/trace_",
    )
    parser.add_argument("prefix", help="value of NEARLINEAR_COLLECTIVES_TRACE")
    parser.add_argument(
        "--torch", type=Path, metavar="FOLDER", help="also write the files that torchfrtrace reads"
    )
    options = parser.parse_args(arguments)
    try:
        dumps = read_dumps(options.prefix)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(explain(dumps)))
    if options.torch:
        write_for_torch(dumps, options.torch)
        print(f"torchfrtrace {options.torch}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
