"""One rank of a team: builds its contestants, and makes them step when the race calls them.

    python -m ci.race.rank PLAN CONTESTANT...

Rank 0 reads from stdin, one JSON line per turn, ``{"contestant": "ours", "step": 3, "traced":
false}``, and answers each with a line: seconds of the slowest rank, mean loss, bytes the busiest
NIC sent; of a traced one, also what rank 0 did when.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from . import model
from .contestants import ENTRIES, build
from .plan import Plan
from .spans import traced

SENT = Path("/sys/class/net") / os.environ.get("GLOO_SOCKET_IFNAME", "eth0") / "statistics/tx_bytes"


def main(plan_text: str, names: list[str]) -> None:
    plan = Plan.from_json(plan_text)
    torch.set_num_threads(1)
    backend = ENTRIES[names[0]].default_backend  # a team's contestants have the same
    if backend == "nearlinear":
        import nearlinear_collectives  # noqa: F401 (registers the backend)
    dist.init_process_group(backend)
    contestants = {}
    for name in names:
        contestants[name] = build(name, plan)
        dist.barrier()
    say({"ready": names})
    while (turn := next_turn()) is not None:
        say(take(contestants[turn["contestant"]], plan, turn))
    dist.barrier()
    dist.destroy_process_group()


def next_turn() -> dict | None:
    """What rank 0 reads, on every rank; None at the end."""
    lines = [sys.stdin.readline() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(lines)
    return json.loads(lines[0]) if lines[0].strip() else None


def take(contestant, plan: Plan, turn: dict) -> dict:
    """One optimizer step, all ranks together."""
    batches = model.batches(plan, turn["step"], dist.get_rank())
    dist.barrier()
    sent, begin = sent_bytes(), perf_counter()
    if turn["traced"] and dist.get_rank() == 0:
        loss, found = traced(contestant, batches)
    else:
        loss, found = contestant.step(batches), {}
    seconds = perf_counter() - begin
    dist.barrier()
    sent = sent_bytes() - sent
    slowest = torch.tensor([seconds, sent], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    mean = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(mean)
    give_back_memory()
    return {
        "contestant": turn["contestant"],
        "step": turn["step"],
        "seconds": slowest[0].item(),
        "sent_bytes": int(slowest[1].item()),
        "loss": mean.item() / dist.get_world_size(),
        **({"spans": found} if found else {}),
    }


def give_back_memory() -> None:
    """Whoever waits shall not hold what it has freed: many contestants share one machine."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def sent_bytes() -> int:
    """By this node's NIC so far; 0 where there is none to read."""
    return int(SENT.read_text()) if SENT.exists() else 0


def say(what: dict) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
