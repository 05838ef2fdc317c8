"""Check one torch release: every operation and FSDP2, with the compiled and the Python glue.

Run ``python -m ci.torch_matrix.checks`` in an environment with the release and numpy, and with
``--package`` in one with the wheels. Prints one line of JSON with the checks and the failure.
"""

import contextlib
import json
import os
import platform
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import nearlinear_collectives
from tests.collectives import runner, training
from tests.collectives.every_operation import every_operation
from tests.collectives.ranks import BACKEND, Pool, RanksFailed

RANKS = 2
GLUES = ("compiled", "python")


def train_sharded(rank: int, memory: str) -> list[float]:
    """Train with FSDP2 and return the losses and parameters.

    Args:
        rank: This rank.
        memory: Communication buffers: FSDP2's own, the backend's, or shared memory.
    """
    model = training.make_model(blocks=2, width=144)
    mesh = init_device_mesh("cpu", (RANKS,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    if training.on_nearlinear() and memory == "shared":
        nearlinear_collectives.use_in(model, mesh.get_group())
    for module in model.modules():
        if training.on_nearlinear() and memory == "backend" and isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    excess = mean_excess()

    def correct(_: float) -> None:
        for parameter in model.parameters():
            parameter.grad /= excess

    return training.train(model, optimizer, rank, clip=correct) + training.summary(model)


def mean_excess() -> float:
    """Return the factor by which a mean is too large: torch 2.8's gloo returns the sum."""
    mean, ones = torch.zeros(1), torch.ones(RANKS)
    dist.reduce_scatter_tensor(mean, ones, op=dist.ReduceOp.AVG)
    return mean.item()


def check_operations(pool: Pool) -> str:
    """Run every operation and return the number of correct calls."""
    program = every_operation(RANKS)
    for wrong, _ in pool.run(runner.run, program, BACKEND, ranks=RANKS):
        if wrong:
            raise AssertionError(f"{len(wrong)} results are wrong, the first: {wrong[0]}")
    return f"{len(program.steps)} calls"


def check_training(pool: Pool) -> str:
    if hasattr(FSDPModule, "set_custom_reduce_scatter"):
        memories, note = ("own", "backend", "shared"), ""
    else:  # torch 2.8's FSDP2 accepts neither buffers nor collectives
        memories, note = ("own",), " in its own memory"
    for memory in memories:
        training.same_as_gloo(pool, train_sharded, memory, ranks=RANKS)
    return f"FSDP2 {training.STEPS} steps{note}"


def check_package() -> str:
    """Train a sharded GPT-2 on 4 ranks with nearlinear and return the number of steps."""
    import transformers

    import nearlinear as nl

    def train(rank: int) -> list[float]:
        nl.init({"hybrid_shard_degree": 2})
        shape = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
        with nl.spmd.one_at_a_time(seed=0):
            config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
            model = transformers.GPT2LMHeadModel(config)
        nl.shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ids = torch.arange(32).repeat(2, 1)
        losses = []
        for _ in range(training.STEPS):
            for batch in nl.accumulate(model, [{"input_ids": ids, "labels": ids}] * 2):
                loss = model(**batch).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    losses = nl.spmd.run(train, ranks=4)[0]
    if losses[-1] >= losses[0]:
        raise AssertionError(f"the loss did not fall: {losses}")
    return f"{nl.__version__}, {len(losses)} steps"


def compile_glue() -> str:
    from nearlinear_collectives import backend, build

    begin = time.monotonic()
    build.engine_library()
    middle = time.monotonic()
    build.glue_library()
    backend.load_glue()
    return f"{time.monotonic() - middle:.0f} s (engine {middle - begin:.0f} s)"


def main() -> int:
    found = {"torch": torch.__version__, "version": platform.python_version(), "failed": ""}
    try:
        if "--package" in sys.argv:
            found["package"] = check_package()
        found["glue"] = compile_glue()
        for glue in GLUES:
            os.environ["NEARLINEAR_COLLECTIVES_GLUE"] = glue
            with contextlib.closing(Pool()) as pool:
                found[glue] = f"{check_operations(pool)}, {check_training(pool)}"
    except (AssertionError, RanksFailed, ImportError, RuntimeError) as error:
        found["failed"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    # Import by name, because ranks import the function to run by its module.
    from ci.torch_matrix import checks

    sys.exit(checks.main())
