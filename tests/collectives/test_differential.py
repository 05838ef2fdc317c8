"""Every operation compared with exact results and with gloo: random programs on 1 to 8 ranks.

NEARLINEAR_SOAK=n runs n times as many examples, with new random ones in each run.
"""

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.collectives import runner
from tests.collectives.programs import (
    COALESCED,
    DTYPES,
    KINDS,
    REDUCES,
    Program,
    Step,
    differences,
    reductions,
)
from tests.collectives.ranks import BACKEND

SOAK = int(os.environ.get("NEARLINEAR_SOAK", "1"))
CPU = torch.device("cpu")
LAYOUTS = ("contiguous", "offset", "strided", "transposed", "mixed")
SMALL = (0, 1, 2, 3, 5, 7, 16, 31, 33, 64, 97, 255, 1021, 4099)
LARGE = (16_384, 65_521, 262_147, 300_007)  # elements: up to 2.3 MiB per rank, many chunks


def examples(count: int):
    return settings(
        max_examples=count * SOAK,
        deadline=None,
        derandomize=SOAK == 1,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        print_blob=True,
    )


@st.composite
def steps(draw, groups: int, sizes=SMALL, kinds=KINDS):
    kind = draw(st.sampled_from(kinds))
    dtype = draw(st.sampled_from(DTYPES))
    tensors = draw(st.integers(1, 4)) if kind in COALESCED else 1
    return Step(
        kind,
        group=draw(st.integers(0, groups - 1)),
        dtype=dtype,
        reduce=draw(st.sampled_from(reductions(dtype))),
        sizes=tuple(draw(st.sampled_from(sizes)) for _ in range(tensors)),
        root=draw(st.integers(0, 7)),
        in_place=draw(st.booleans()),
        layout=draw(st.sampled_from(LAYOUTS)),
        pooled=draw(st.booleans()),
        overlap=draw(st.sampled_from((0, 0, 1, 2, 5))),
        jitter=draw(st.integers(0, 3)) == 0,
    )


@st.composite
def programs(draw, length: int):
    """Draw up to three groups in addition to that of all ranks, with at most one large step."""
    ranks = draw(st.integers(1, 8))
    subset = st.lists(st.integers(0, ranks - 1), min_size=1, unique=True).map(sorted).map(tuple)
    groups = (tuple(range(ranks)), *draw(st.lists(subset, max_size=3)))
    body = draw(st.lists(steps(len(groups)), min_size=1, max_size=length))
    if draw(st.booleans()):
        place = draw(st.integers(0, len(body)))
        body.insert(place, draw(steps(len(groups), sizes=LARGE)))
    return Program(groups, tuple(body), seed=draw(st.integers(0, 1000)))


def as_gloo_can(program: Program) -> Program:
    """Replace int16, and lists of uneven tensors."""
    even = {f"{kind}_uneven": f"{kind}_list" for kind in ("all_gather", "reduce_scatter")}
    body = [
        dataclasses.replace(
            s, dtype=s.dtype.replace("int16", "int32"), kind=even.get(s.kind, s.kind)
        )
        for s in program.steps
    ]
    return dataclasses.replace(program, steps=tuple(body))


def check(pool, program: Program, backend: str = BACKEND) -> None:
    """Check the results of every rank, and that reductions are bitwise equal on all ranks."""
    ranks = len(program.groups[0])
    if backend == "gloo":
        program = as_gloo_can(program)
    results = pool.run(runner.run, program, backend, ranks=ranks, limit=40)
    wrong = [f"rank {rank} {line}" for rank, (lines, _) in enumerate(results) for line in lines]
    assert not wrong, "\n".join([backend, *wrong[:8]])
    for index, step in enumerate(program.steps):
        if not step.sizes == (0,):
            bits = {digests[index] for _, digests in results if index in digests}
            assert len(bits) <= 1, f"{backend}: ranks differ in the bits of step {index} {step}"


@examples(60)
@given(program=programs(length=12))
def test_random_programs_give_exact_results(pool, program):
    check(pool, program)


@examples(12)
@given(program=programs(length=12))
def test_gloo_passes_the_same_checks(pool, program):
    """Validate the reference of these tests with gloo."""
    check(pool, program, backend="gloo")


PLACES = ((0, 1), (0, 1, 2), (0, 0, 1, 1), (0, 0, 0, 1, 1), (0, 1, 0, 2, 1, 0))


def run_between_nodes(rank, program, nodes):
    """Run a program on a new group whose ranks are on emulated nodes; return wrong results.

    Sums of 16-bit floats are rounded on each node before they are sent.
    """
    os.environ["NEARLINEAR_COLLECTIVES_NODE"] = str(nodes[rank])
    try:
        group = dist.new_group(backend=BACKEND)
    finally:
        del os.environ["NEARLINEAR_COLLECTIVES_NODE"]
    outputs = runner.Runner(program, rank, [group]).run()
    dist.destroy_process_group(group)
    return differences(program, rank, outputs, wide=False)


@st.composite
def programs_on_nodes(draw):
    nodes = draw(st.sampled_from(PLACES))
    body = draw(st.lists(steps(1, sizes=SMALL + LARGE[:3]), min_size=1, max_size=8))
    return Program((tuple(range(len(nodes))),), tuple(body), seed=draw(st.integers(0, 1000))), nodes


@pytest.mark.skipif(BACKEND == "gloo", reason="emulates nodes for nearlinear")
@examples(25)
@given(case=programs_on_nodes())
def test_random_programs_between_nodes_give_exact_results(pool, case):
    program, nodes = case
    results = pool.run(run_between_nodes, program, nodes, ranks=len(nodes), limit=40)
    wrong = [f"rank {rank} {line}" for rank, lines in enumerate(results) for line in lines]
    assert not wrong, "\n".join(wrong[:8])


ELEMENTWISE = [(dtype, reduce) for dtype in DTYPES for reduce in reductions(dtype)]


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "reduce_scatter_uneven"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_dtype_and_reduction_gives_exact_results(pool, kind, ranks):
    body = [
        Step(kind, dtype=dtype, reduce=reduce, sizes=(count,), overlap=count % 3)
        for dtype, reduce in ELEMENTWISE
        for count in (1, 67, 5003)
    ]
    check(pool, Program((tuple(range(ranks)),), tuple(body), seed=ranks))


@pytest.mark.parametrize(
    "kind",
    [
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "broadcast",
        "all_to_all_uneven",
        "gather",
        "ring",
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_sizes_around_powers_of_two_give_exact_results(pool, ranks, kind):
    """Cover chunk ends and the sizes at which the engine changes its path; 4 bytes per element."""
    sizes = [2**power + extra for power in (12, 13, 15, 18) for extra in (-1, 0, 1)]
    if ranks <= 3:
        sizes.append(700_001)
    body = [
        Step(kind, sizes=(size,), pooled=pooled, in_place=pooled and size % 2 == 0, root=size)
        for size in sizes
        for pooled in (False, True)
    ]
    check(pool, Program((tuple(range(ranks)),), tuple(body), seed=ranks))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
def test_back_to_back_calls_keep_their_order(pool, pooled, in_place):
    """Make hundreds of calls without a pause, of sizes that use different paths of the engine."""
    kinds = ("all_gather", "all_reduce", "reduce_scatter", "broadcast", "all_gather_views",
             "all_to_all_uneven", "scatter")  # fmt: skip
    sizes = (1, 40_000, 9, 300, 5_000, 1, 1, 70_001, 0)
    body = [
        Step(kinds[i % 7], sizes=(sizes[i % 9],), pooled=pooled, in_place=in_place, root=i)
        for i in range(270)
    ]
    check(pool, Program(((0, 1, 2, 3),), tuple(body)))


def reuse_tensors(rank, count, pooled):
    """Reuse one input and one output for many calls, and change them in between."""
    size, backend = dist.get_world_size(), dist.group.WORLD._get_backend(CPU)

    def empty(length: int) -> torch.Tensor:
        if pooled:
            return backend.allocate_tensor(length, dtype=torch.float32, device=CPU)
        return torch.empty(length)

    gathered, reduced, source = empty(size * count), empty(count), empty(size * count)
    own = gathered[rank * count : (rank + 1) * count]
    for step in range(8):
        own.fill_(100.0 * step + rank)
        runner.all_gather_single(gathered, own)
        parts = [part.unique().tolist() for part in gathered.view(size, count)]
        assert parts == [[100.0 * step + other] for other in range(size)], step
        source.copy_(gathered)
        runner.reduce_scatter_single(reduced, source)
        assert reduced.unique().tolist() == [size * (100.0 * step + rank)], step
        dist.all_reduce(gathered)  # a gathered tensor is writable
        assert gathered[-1] == size * (100.0 * step + size - 1), step


@pytest.mark.parametrize("count", [10, 20_000, 300_003])
@pytest.mark.parametrize("pooled", [False, True])
def test_reused_tensors_give_exact_results(pool, count, pooled):
    pool.run(reuse_tensors, count, pooled and BACKEND != "gloo", ranks=4)


@examples(15)
@given(program=programs(length=8))
def test_results_do_not_depend_on_wait_order(pool, program):
    """Compare bitwise with the same program in synchronous calls on ordinary memory."""
    assume(any(step.kind in REDUCES for step in program.steps))
    ranks = len(program.groups[0])
    calm = [
        dataclasses.replace(s, overlap=0, pooled=False, layout="contiguous", jitter=False)
        for s in program.steps
    ]
    calm = dataclasses.replace(program, steps=tuple(calm))
    results = [pool.run(runner.run, p, BACKEND, ranks=ranks, limit=40) for p in (program, calm)]
    for (_, as_drawn), (_, calmly) in zip(*results, strict=True):
        assert as_drawn == calmly
