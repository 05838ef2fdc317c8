"""Compositions of parallelism: runs every cell of the composition table of the documentation."""

import functools
import itertools
from pathlib import Path

import pytest

import nearlinear as nl
from nearlinear.distributed.mesh import Mesh
from tests.support import parity

PAGE = Path(__file__).parents[2] / "packages/core/docs/concepts/parallelism.md"
AXES = ("tensor", "context", "expert", "pipeline", "shard", "replicate")

TENSOR = {"tensor_parallel_degree": 2}
CONTEXT = {"context_parallel_degree": 2}
EXPERT = {"expert_parallel_degree": 2}
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
GATHER = {"cp_comm_type": "all_gather"}

RUNS = [
    (4, "llama", TENSOR | CONTEXT),
    (8, "gpt2", TENSOR | CONTEXT | {"hybrid_shard_degree": 4}),
    (8, "gpt_neox", TENSOR | CONTEXT | GATHER | {"hybrid_shard_degree": 2}),
    (4, "mixtral", TENSOR | EXPERT),
    (8, "mixtral", TENSOR | EXPERT | {"hybrid_shard_degree": 4}),
    (8, "mixtral", TENSOR | EXPERT | {"hybrid_shard_degree": 2}),
    (2, "mixtral", CONTEXT | EXPERT),
    (8, "mixtral", CONTEXT | EXPERT | {"hybrid_shard_degree": 4}),
    (8, "mixtral", TENSOR | CONTEXT | EXPERT | {"hybrid_shard_degree": 2}),
    (4, "llama", PIPELINE | TENSOR),
    (8, "gpt2", PIPELINE | TENSOR | {"hybrid_shard_degree": 2}),
    (8, "gpt_neox", PIPELINE | TENSOR | {"hybrid_shard_degree": 2, "pipeline": "simple"}),
    (8, "mistral", PIPELINE | TENSOR | {"hybrid_shard_degree": 1, "placement_strategy": "TPD"}),
    (4, "gpt2", PIPELINE | CONTEXT),
    (8, "llama", PIPELINE | CONTEXT | {"hybrid_shard_degree": 2}),
    (8, "llama", PIPELINE | CONTEXT | GATHER | {"hybrid_shard_degree": 4}),
    (4, "mixtral", PIPELINE | EXPERT),
    (8, "mixtral", PIPELINE | EXPERT | {"hybrid_shard_degree": 4}),
    (8, "mixtral", PIPELINE | TENSOR | EXPERT),
    (8, "llama_tied", PIPELINE | TENSOR | CONTEXT | {"pipeline": "zbv_zero_bubble"}),
    (8, "mixtral", PIPELINE | CONTEXT | EXPERT | {"hybrid_shard_degree": 2}),
]
reference = functools.cache(parity.alone)


def used_axes(ranks: int, config: dict) -> set[str]:
    """Return the axes with a degree above 1, including expert parallelism."""
    mesh = Mesh.from_config(nl.ParallelConfig(**config), ranks)
    return {axis for axis in AXES if getattr(mesh, axis) > 1}


def run_id(run) -> str:
    ranks, family, config = run
    return f"{family}: {' x '.join(axis for axis in AXES if axis in used_axes(ranks, config))}"


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_composed_training_equals_one_process(run):
    """Each of two AdamW steps has two micro-batches with different numbers of targets."""
    ranks, family, config = run
    rows = parity.ROWS // Mesh.from_config(nl.ParallelConfig(**config), ranks).data_ranks
    accumulation = 2 if rows >= 2 * config.get("microbatches", 1) else 1
    changes = parity.layers(family, 4) if "pipeline" in used_axes(ranks, config) else {}
    together = functools.partial(parity.together, **changes)
    found = nl.spmd.run(together, ranks, args=(family, config, accumulation))
    parity.assert_equal(found, reference(family, **changes))


@pytest.mark.parametrize("family", sorted(set(parity.FAMILIES) - {"gpt2"}))
def test_every_family_with_pipeline_tensor_and_shards_equals_one_process(family):
    """GPT-2 is one of RUNS."""
    config = PIPELINE | TENSOR | {"hybrid_shard_degree": 2}
    changes = parity.layers(family, 4)
    together = functools.partial(parity.together, **changes)
    parity.assert_equal(
        nl.spmd.run(together, 8, args=(family, config, 2)), reference(family, **changes)
    )


def test_documented_composition_table_equals_tested_runs():
    lines = PAGE.read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("| composes with"))
    header = [cell.strip() for cell in lines[begin].split("|")[2:-1]]
    documented = set()
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        row, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        documented |= {frozenset((row, column)) for column, cell in zip(header, cells, strict=True)
                 if cell == "yes"}  # fmt: skip
    run = set()
    for ranks, _, config in RUNS:
        run |= {frozenset(pair) for pair in itertools.combinations(used_axes(ranks, config), 2)}
    parallel = {frozenset(pair) for pair in itertools.combinations(AXES, 2)}
    assert documented == parallel == run | {frozenset(("shard", "replicate"))}


def four_axes_over_processes(rank):
    config = PIPELINE | TENSOR | {"hybrid_shard_degree": 1}
    return parity.together(rank, "llama", config, **parity.layers("llama", 4))


@pytest.mark.slow
def test_composition_over_processes():
    found = nl.spmd.run(four_axes_over_processes, 4, processes=True)
    parity.assert_equal(found, reference("llama", **parity.layers("llama", 4)))
