"""What is run on each release: every operation against gloo, both glues, and FSDP2.

``python -m ci.torch_matrix.checks`` in an environment with that torch; it needs nothing but numpy
beside it. Prints one line of JSON: what was checked, and what went wrong.
"""

import contextlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.collectives import runner, training
from tests.collectives.every_operation import every_operation
from tests.collectives.ranks import Pool, RanksFailed

RANKS = 2
GLUES = ("compiled", "python")


def gather_into_one(rank: int) -> list[float] | None:
    gathered = torch.empty(2 * RANKS) if rank == 1 else None
    dist.gather_single(torch.full((2,), rank + 1.0), gathered, dst=1)
    return None if gathered is None else gathered.tolist()


def check_newer_operations(pool: Pool) -> str:
    """What c10d has gained since torch 2.13."""
    if not hasattr(dist, "gather_single"):
        return ""
    for backend in ("gloo", "nearlinear"):
        found = pool.run(gather_into_one, ranks=RANKS, backend=backend)
        if found != [None, [1.0, 1.0, 2.0, 2.0]]:
            raise AssertionError(f"{backend}: gather_single gave {found}")
    return "gather_single, "


def train_sharded(rank: int, pooled: bool) -> list[float]:
    """FSDP2, optionally in the backend's memory: losses, and what the parameters have become."""
    model = training.make_model(blocks=2, width=144)
    mesh = init_device_mesh("cpu", (RANKS,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    for module in model.modules():
        if pooled and training.on_nearlinear() and isinstance(module, FSDPModule):
            switch = getattr(module, "set_allocate_memory_from_process_group_for_comm", None)
            if switch is not None:
                switch(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return training.train(model, optimizer, rank) + training.summary(model)


def check_operations(pool: Pool) -> str:
    """How many calls gave the truth on our backend, and, as the reference's own test, on gloo."""
    program = every_operation(RANKS)
    for backend in ("nearlinear", "gloo"):
        for wrong, _ in pool.run(runner.run, program, backend, ranks=RANKS, backend=backend):
            if wrong:
                raise AssertionError(f"{backend}: {len(wrong)} results are wrong, first {wrong[0]}")
    return f"{len(program.steps)} calls"


def check_training(pool: Pool) -> str:
    for pooled in (False, True):
        training.same_as_gloo(pool, train_sharded, pooled, ranks=RANKS)
    return f"FSDP2 {training.STEPS} steps"


def compile_glue() -> str:
    from nearlinear_collectives import backend, build

    begin = time.monotonic()
    build.engine_library()
    middle = time.monotonic()
    build.glue_library()
    backend.load_glue()
    return f"{time.monotonic() - middle:.0f} s (engine {middle - begin:.0f} s)"


def main() -> int:
    found = {"torch": torch.__version__, "failed": ""}
    try:
        found["glue"] = compile_glue()
        for glue in GLUES:
            os.environ["NEARLINEAR_COLLECTIVES_GLUE"] = glue
            with contextlib.closing(Pool()) as pool:
                newer = check_newer_operations(pool)
                found[glue] = f"{check_operations(pool)}, {newer}{check_training(pool)}"
    except (AssertionError, RanksFailed, ImportError, RuntimeError) as error:
        found["failed"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
