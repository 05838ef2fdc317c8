"""Random programs of collectives and messages, and their expected results.

Every input is drawn from (seed, step, rank), so that each rank can compute the exact result of each
step alone, floats in float64. No second implementation has to be trusted.
"""

import dataclasses
import functools
import hashlib
import random

import torch

FLOATS = ("float32", "float64", "bfloat16", "float16")
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
DTYPES = (*FLOATS, *INTEGERS, "bool")
ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")
BITWISE = ("BAND", "BOR", "BXOR")

GATHERS = ("all_gather", "all_gather_list", "all_gather_views", "all_gather_coalesced",
           "all_gather_uneven")  # fmt: skip
SCATTERS = ("reduce_scatter", "reduce_scatter_list", "reduce_scatter_coalesced",
            "reduce_scatter_uneven")  # fmt: skip
EXCHANGES = ("all_to_all", "all_to_all_list", "all_to_all_uneven")
REDUCES = ("all_reduce", "all_reduce_coalesced")
COALESCED = ("all_gather_coalesced", "reduce_scatter_coalesced", "all_reduce_coalesced")
COLLECTIVES = (*GATHERS, *SCATTERS, *REDUCES, *EXCHANGES, "broadcast", "barrier", "reduce",
               "gather", "scatter")  # fmt: skip
RINGS = ("ring", "ring_batch")  # send to the next rank, receive from the previous one
KINDS = (*COLLECTIVES, *RINGS, "from_any")  # from_any: the root receives from each other rank
JOINED = ("all_gather_list", "all_gather_views", "all_gather_uneven", "all_to_all_list", "gather",
          "from_any")  # fmt: skip
TABLE = 3_000_017  # elements of the table of random numbers; more than any tensor
SHARED = (*GATHERS, *REDUCES, "broadcast")  # every rank has the same result


@dataclasses.dataclass(frozen=True)
class Step:
    """A call; ``sizes`` are elements per rank, one per tensor of a coalesced call."""

    kind: str
    group: int = 0
    dtype: str = "float32"
    reduce: str = "SUM"
    sizes: tuple[int, ...] = (5,)
    root: int = 0  # modulo the size of the group
    in_place: bool = False
    layout: str = "contiguous"  # or offset, strided, transposed, mixed (different on every rank)
    pooled: bool = False  # tensors from the backend's allocate_tensor
    overlap: int = 0  # 0: synchronous; k: asynchronous, waited for k steps later
    jitter: bool = False  # ranks arrive up to 2 ms apart


@dataclasses.dataclass(frozen=True)
class Program:
    """Steps of several groups; every rank of a group runs the group's steps in the same order."""

    groups: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    seed: int = 0


def reductions(dtype: str) -> tuple[str, ...]:
    """Return the reductions that every backend supports: no bitwise floats, no integer means."""
    return (*ARITHMETIC, "AVG") if dtype in FLOATS else (*ARITHMETIC, *BITWISE)


def values(program: Program, step: int, rank: int, count: int, part: int = 0) -> torch.Tensor:
    """Return the input of ``rank`` for tensor ``part`` of a step: (count,), contiguous, read-only.

    Inputs are windows of one long table, so large tensors cost nothing to draw on any rank.
    """
    numbers = table(program.steps[step].dtype, program.steps[step].reduce == "PRODUCT")
    place = random.Random(hash((program.seed, step, rank, part)))
    start = place.randrange(len(numbers) - count)
    return numbers[start : start + count]


@functools.cache
def table(dtype_name: str, near_one: bool) -> torch.Tensor:
    dtype, source = getattr(torch, dtype_name), torch.Generator().manual_seed(5)
    if dtype.is_floating_point:
        if near_one:  # keeps products of many ranks in range
            return (torch.rand(TABLE, generator=source) + 0.5).to(dtype)
        return torch.randn(TABLE, generator=source).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (TABLE,), generator=source).bool()
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (TABLE,), generator=source).to(dtype)


def elements(step: Step, source: int, target: int, part: int = 0) -> int:
    """Return the elements that member ``source`` of the group has for member ``target``."""
    uneven = {"all_to_all_uneven": source + 2 * target, "all_gather_uneven": source + 1,
              "reduce_scatter_uneven": target + 1}  # fmt: skip
    return step.sizes[part] * (uneven[step.kind] % 3 if step.kind in uneven else 1)


def combine(
    parts: list[torch.Tensor], reduce: str, wide: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact reduction of the tensors, and the allowed error.

    Floats are returned in float64. The allowed error covers one rounding to the dtype at the end
    and one rounding of the accumulator per source; with ``wide``, 16-bit dtypes accumulate in 32
    bits.
    """
    dtype, n, exactly = parts[0].dtype, len(parts), torch.zeros(())
    if dtype == torch.bool:
        count = torch.stack(parts).sum(0)
        if reduce == "BXOR":
            return count % 2 == 1, exactly
        return (count == n if reduce in ("PRODUCT", "MIN", "BAND") else count > 0), exactly
    if not dtype.is_floating_point:
        combine_two = {
            "SUM": torch.add,
            "PRODUCT": torch.mul,
            "MIN": torch.minimum,
            "MAX": torch.maximum,
            "BAND": torch.bitwise_and,
            "BOR": torch.bitwise_or,
            "BXOR": torch.bitwise_xor,
        }[reduce]
        total = parts[0].long()
        for part in parts[1:]:
            total = combine_two(total, part.long())
        return total.to(dtype), exactly  # wraps around like the machine's integers
    stacked = torch.stack(parts).double()
    if reduce in ("MIN", "MAX"):
        return (stacked.amin(0) if reduce == "MIN" else stacked.amax(0)), exactly
    rounding = torch.finfo(dtype).eps / 2
    each = torch.finfo(torch.float32 if wide and dtype.itemsize == 2 else dtype).eps
    smallest = torch.finfo(dtype).smallest_normal
    if reduce == "PRODUCT":
        exact = stacked.prod(0)
        return exact, exact.abs() * (rounding + n * each) + smallest
    scale = 1 / n if reduce == "AVG" else 1.0
    exact, magnitude = stacked.sum(0) * scale, stacked.abs().sum(0) * scale
    return exact, exact.abs() * rounding + magnitude * n * each + smallest


def expected(
    program: Program, index: int, rank: int, wide: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the exact values (flat) and the allowed error of each output of ``rank``."""
    step = program.steps[index]
    members = program.groups[step.group]
    n, me, root = len(members), members.index(rank), step.root % len(members)
    if step.kind == "barrier" or (step.kind in ("reduce", "gather", "from_any") and me != root):
        return []

    def result(part: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        def of(member: int) -> torch.Tensor:
            size = elements(step, members.index(member), me, part)
            return values(program, index, member, size, part)

        def mine_of(member: int) -> torch.Tensor:
            sizes = [elements(step, members.index(member), i, part) for i in range(n)]
            whole = values(program, index, member, sum(sizes), part)
            return whole.split(sizes)[me]

        if step.kind in SCATTERS:
            return combine([mine_of(member) for member in members], step.reduce, wide)
        if step.kind in (*REDUCES, "reduce"):
            return combine([of(member) for member in members], step.reduce, wide)
        if step.kind in (*GATHERS, "gather", "from_any"):
            exact = torch.cat([of(member) for member in members])
        elif step.kind in EXCHANGES:
            exact = torch.cat([mine_of(member) for member in members])
        elif step.kind == "scatter":
            exact = mine_of(members[root])
        elif step.kind in RINGS:
            exact = of(members[me - 1])
        else:
            exact = of(members[root])
        return exact, torch.zeros(())

    return [result(part, count) for part, count in enumerate(step.sizes)]


def flat(outputs: list[torch.Tensor], step: Step) -> list[torch.Tensor]:
    """Flatten outputs to contiguous tensors; the list of a gather becomes one tensor."""
    parts = [torch.cat([output.reshape(-1)]) for output in outputs]
    return [torch.cat(parts)] if step.kind in JOINED and parts else parts


def differences(
    program: Program, rank: int, outputs: list[list[torch.Tensor]], wide: bool
) -> list[str]:
    """Describe every wrong output of ``rank`` on one line (``wide``: see combine)."""
    lines = []
    for index, step in enumerate(program.steps):
        if rank not in program.groups[step.group]:
            continue
        found = flat(outputs[index], step)
        wanted = expected(program, index, rank, wide)
        for part, (have, (exact, bound)) in enumerate(zip(found, wanted, strict=True)):
            if have.dtype == torch.bool:  # any non-zero byte is true: compare truth values
                have = have.view(torch.uint8) != 0
            right = have == exact
            if bound.dim() and not right.all():
                right |= (have.double() - exact).abs() <= bound
            if not right.all():
                where = (~right).nonzero().flatten().tolist()
                lines.append(
                    f"step {index} {step} output {part}: {len(where)} of {have.numel()} elements "
                    f"are wrong, at {where[:3]}...{where[-1]}: {have[where[:3]].tolist()} "
                    f"instead of {exact[where[:3]].tolist()}"
                )
    return lines


def fingerprints(program: Program, outputs: list[list[torch.Tensor]]) -> dict[int, str]:
    """Return a digest of the bits of each step whose result is equal on all ranks."""
    found = {}
    for index, step in enumerate(program.steps):
        if outputs[index] and step.kind in SHARED:
            digest = hashlib.blake2b(digest_size=8)
            for part in flat(outputs[index], step):
                digest.update(part.view(torch.uint8).numpy().tobytes())
            found[index] = digest.hexdigest()
    return found
