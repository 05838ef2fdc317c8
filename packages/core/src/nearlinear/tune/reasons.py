"""Why each setting was picked, in plain words, with the numbers that decided."""

from dataclasses import dataclass

from . import estimate
from .choose import (
    BUCKET_SHARE,
    LIVE_SHARE,
    Job,
    Layout,
    Measured,
    best,
    divisors,
    staged,
    with_settings,
)
from .estimate import Work


@dataclass(frozen=True)
class Setting:
    """One key of the config: what was picked, what it was, and why."""

    key: str
    value: object
    previous: object
    reason: str


def settings(work: Work, job: Job, measured: Measured, layouts: list[Layout]) -> list[Setting]:
    """The settings of the best of ``layouts``.

    What the config says already, in whatever words, is left as it is written there.
    """
    chosen = best(layouts)
    return [
        _degree(work, job, layouts, chosen),
        _backend(job, layouts, chosen),
        _hierarchical(work, job, measured, chosen),
        _prefetch(work, job, measured, chosen),
        _live(work, job, chosen),
        _bucket(work, job, chosen),
    ]


def _setting(job: Job, key: str, value, same: bool, reason: str) -> Setting:
    previous = getattr(job.config, key)
    return Setting(key, previous if same else value, previous, reason)


def _degree(work: Work, job: Job, layouts: list[Layout], chosen: Layout) -> Setting:
    same = (job.config.hybrid_shard_degree or job.world) == chosen.degree
    degrees = sorted({layout.degree for layout in layouts})
    others = [best([x for x in layouts if x.degree == d]) for d in degrees if d != chosen.degree]
    reason = f"{ms(chosen.step.total)} of communication per optimizer step, estimated"
    if others:
        reason += "; with " + ", ".join(f"{x.degree}: {ms(x.step.total)}" for x in others)
    too_big = [d for d in divisors(job.world) if d not in degrees]
    if too_big:
        these = ", ".join(map(str, too_big))
        reason += (
            f"; with {these} it does not fit: at {max(too_big)} a rank needs "
            f"{gib(estimate.needed(work, max(too_big), 1))} and has {gib(job.memory)}"
        )
    if same and not job.config.hybrid_shard_degree:
        reason = f"all {job.world} ranks: {reason}"
    if job.world == 1:
        reason = "there is one rank"
    return _setting(job, "hybrid_shard_degree", chosen.degree, same, reason)


def _backend(job: Job, layouts: list[Layout], chosen: Layout) -> Setting:
    rivals = [x for x in layouts if x.degree == chosen.degree and x.backend != chosen.backend]
    reason = f"{ms(chosen.step.total)} of communication per step over {chosen.backend}"
    reason += "".join(f", {ms(x.step.total)} over {x.backend}" for x in rivals)
    if not rivals:
        reason = f"{chosen.backend} is the only backend here"
    elif chosen.step.total == min(x.step.total for x in rivals):
        reason = "nothing is communicated" if not chosen.step.total else reason + ": no difference"
    same = job.backend == chosen.backend
    return _setting(job, "communication_backend", chosen.backend, same, reason)


def _hierarchical(work: Work, job: Job, measured: Measured, chosen: Layout) -> Setting:
    key, times = "hierarchical_all_gather", measured[chosen.degree, chosen.backend]
    if not staged(times):
        reason = "no effect: shard groups do not span nodes with several ranks each"
        return _setting(job, key, chosen.way, True, reason)
    rest = chosen.depth, chosen.live, chosen.bucket
    in_order = ("off", "one stage"), ("on", "two stages"), ("auto", "each size its faster way")
    reason = "gathers and reductions of a step take " + ", ".join(
        f"{ms(_between_shards(work, chosen, times, way, rest))} in {words}"
        if way != "auto"
        else f"{ms(_between_shards(work, chosen, times, way, rest))} with {words}"
        for way, words in in_order
    )
    return _setting(job, key, chosen.way, job.config.hierarchical_all_gather == chosen.way, reason)


def _between_shards(work: Work, chosen: Layout, times, way: str, rest: tuple) -> float:
    step = with_settings(work, chosen.degree, chosen.backend, times, (way, *rest)).step
    return step.gathers + step.reductions


def _prefetch(work: Work, job: Job, measured: Measured, chosen: Layout) -> Setting:
    times = measured[chosen.degree, chosen.backend]
    gather = estimate.block_gather(work, times, chosen.way)
    reason = f"a block's gather takes {ms(gather)}, its forward pass {ms(work.forward)}"
    if gather == 0:
        reason = "blocks are not gathered from other ranks"
    elif gather <= work.forward:
        reason += ": one block ahead hides it"
    elif chosen.depth == 1:
        reason += ": one ahead does not hide it, and there is no room or no block for more"
    else:
        reason += ": gathers begin earlier"
    same = job.config.prefetch_depth == chosen.depth
    return _setting(job, "prefetch_depth", chosen.depth, same, reason)


def _live(work: Work, job: Job, chosen: Layout) -> Setting:
    now = estimate.kept_with(work, chosen.depth, job.config.sdp_max_live_parameters)
    room = f"{LIVE_SHARE:.0%} of the memory left beside states, activations and gradients"
    blocks = len(work.blocks)
    if chosen.kept == blocks:
        reason = f"all {work.parameters:,} parameters fit in {room}: each is gathered once per step"
    elif chosen.kept:
        reason = (
            f"{chosen.kept} of {blocks} blocks fit in {room} and stay gathered for a whole step"
        )
    else:
        reason = f"no block more than the schedule needs fits in {room}"
    return _setting(job, "sdp_max_live_parameters", chosen.live, now == chosen.kept, reason)


def _bucket(work: Work, job: Job, chosen: Layout) -> Setting:
    key, asked = "sdp_reduce_bucket_size", job.config.sdp_reduce_bucket_size
    if not job.on_lanes(chosen.degree):
        reason = "no effect: that is for reductions beside computation on the CPU"
        return _setting(job, key, asked, True, reason)
    room = f"{BUCKET_SHARE:.0%} of the memory left beside what must be"
    if chosen.bucket >= work.parameters:
        reason = f"all {work.parameters:,} parameters' gradients fit in {room}"
    elif chosen.bucket > max(work.root, *work.blocks):
        reason = f"the gradients of {chosen.bucket:,} parameters fit in {room}"
    else:
        reason = "one unit's gradients at a time"
    return _setting(job, key, chosen.bucket, chosen.bucket == asked, reason)


def ms(seconds: float) -> str:
    """Milliseconds with about three digits: ``0.042 ms``, ``4.20 ms``, ``420 ms``."""
    value = seconds * 1e3
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} ms"


def gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
