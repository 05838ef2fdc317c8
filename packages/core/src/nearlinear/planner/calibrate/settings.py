"""Choose communication settings for a measured node with the planner's time and memory model.

The model evaluates every combination of shard degree, backend, all-gather mode, prefetch depth and
resident blocks. Real steps of the best combinations that fit then decide; without them, the fastest
prediction wins. Among combinations within `WORTH` of the fastest, the one that changes the fewest
settings is chosen.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ...config.train import TrainConfig
from ...distributed.mesh import Mesh
from ...errors import ConfigError
from ...output import format_table
from ..cluster import Cluster
from ..fitted_constants import constants_for
from ..memory import estimate
from ..memory.rank import REDUCED_BYTES
from ..network_time import rank_group
from ..step_time import step_time
from ..workload import unit_parameters, workload_from_config
from .collectives import divisors

KEYS = (
    "hybrid_shard_degree",
    "communication_backend",
    "hierarchical_all_gather",
    "prefetch_depth",
    "sdp_max_live_parameters",
)
WORTH = 0.005  # relative difference of step times below which settings count as equal
MAX_PREFETCH = 4
TOP = 3  # predictions that real steps are compared for
BUCKET_SHARE = 0.25  # share of the free memory for gradients in flight


@dataclass(frozen=True)
class TunedCandidate:
    """A combination of settings and its prediction."""

    settings: dict[str, Any]
    """Values of `KEYS`."""
    seconds: float
    """Seconds per step."""
    memory: int
    """Bytes per rank."""
    fits: bool
    measured: float = math.nan
    """Seconds per real step; NaN if it was not run."""


@dataclass(frozen=True)
class TunedSetting:
    """Chosen value of a setting, and the reason."""

    key: str
    value: Any
    previous: Any
    reason: str


@dataclass(frozen=True)
class TuneResult:
    """Candidates of ``nearlinear tune``, and the chosen settings."""

    config: TrainConfig
    cluster: Cluster
    memory: int
    """Bytes available per rank."""
    candidates: list[TunedCandidate]
    chosen: TunedCandidate
    current: TunedCandidate | None
    """The config as it is; None if it does not fit."""
    settings: list[TunedSetting]
    finalists: list[TunedCandidate]
    """Candidates of which real steps were measured, the fastest prediction first."""

    @property
    def tuned_config(self) -> TrainConfig:
        values = {setting.key: setting.value for setting in self.settings}
        return _with_parallel(self.config, values)

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers by name, in seconds and bytes."""
        rows = self.cluster.node.collectives
        return {
            "ranks": self.cluster.world,
            "memory": self.memory,
            "measured": [dataclasses.asdict(row) for row in rows],
            "estimated": [dataclasses.asdict(each) for each in _best_by_layout(self.candidates)],
            "before": dataclasses.asdict(self.current) if self.current else None,
            "chosen": dataclasses.asdict(self.chosen),
            "finalists": [dataclasses.asdict(each) for each in self.finalists],
            "settings": {each.key: dataclasses.asdict(each) for each in self.settings},
        }

    def __str__(self) -> str:
        rows = [("degree", "backend", "GiB/rank", "ms per step", "")]
        for each in _best_by_layout(self.candidates):
            degree, backend = (str(each.settings[key]) for key in KEYS[:2])
            same = (degree, backend) == tuple(str(self.chosen.settings[key]) for key in KEYS[:2])
            mark = "<- chosen" if same else "" if each.fits else "does not fit"
            gib = f"{each.memory / 2**30:.3g}"
            rows.append((degree, backend, gib, f"{each.seconds * 1e3:.4g}", mark))
        now = f"{self.current.seconds * 1e3:.4g} ms" if self.current else "does not fit"
        lines = [
            "predicted step time of the best settings for each degree and backend:",
            *format_table(rows, left=(1, 4)),
            f"predicted step time: {self.chosen.seconds * 1e3:.4g} ms with the chosen settings; "
            f"the config as it is: {now}",
            f"memory: {self.chosen.memory / 2**30:.3g} of {self.memory / 2**30:.3g} GiB per rank",
            *self._format_finalists(),
            "",
            "chosen:",
            *(_format_setting(each) for each in self.settings),
            "",
            "[parallel]",
            *(f"{each.key} = {json.dumps(each.value)}" for each in self.settings),
        ]
        return "\n".join(lines)

    def _format_finalists(self) -> list[str]:
        if not self.finalists:
            return []
        rows = [("degree", "backend", "live parameters", "predicted ms", "measured ms", "")]
        for each in self.finalists:
            degree, backend, _, _, live = (str(each.settings[key]) for key in KEYS)
            predicted, measured = f"{each.seconds * 1e3:.4g}", f"{each.measured * 1e3:.4g}"
            mark = "<- chosen" if each == self.chosen else ""
            rows.append((degree, backend, live, predicted, measured, mark))
        fastest = min(each.measured for each in self.finalists)
        lines = [
            "",
            "real steps on random tokens:",
            *format_table(rows, left=(1, 5)),
            f"the fastest prediction is {self.finalists[0].measured / fastest - 1:.1%} slower than "
            f"the fastest of {len(self.finalists)} measured",
        ]
        if len(self.finalists) > TOP:
            top = min(each.measured for each in self.finalists[:TOP])
            lines.append(
                f"the fastest of the first {TOP} predictions is {top / fastest - 1:.1%} slower"
            )
        return lines


def choose_settings(
    config: TrainConfig,
    cluster: Cluster,
    memory: int,
    vocabulary: int,
    backend: str,
    measure: Callable[[list[TrainConfig]], list[float]] | None = None,
    finalists: int = TOP,
) -> TuneResult:
    """Choose the settings of `KEYS` and ``sdp_reduce_bucket_size`` for ``config``.

    Args:
        config: The config to tune.
        cluster: Measured nodes.
        memory: Bytes available per rank.
        vocabulary: Vocabulary size.
        backend: Backend that the config's ``communication_backend`` selects on this device.
        measure: Returns the seconds of a real step of each config, see `real_steps.time_steps`.
        finalists: Number of candidates that are measured, besides the config as it is.

    Raises ConfigError if nothing fits.
    """
    budget = config.parallel.memory_budget
    if budget != "auto":
        live = config.parallel.live_parameters
        config = _with_parallel(config, {"memory_budget": "auto", "sdp_max_live_parameters": live})
    tuner = _Tuner(config, cluster, memory, vocabulary, backend)
    found = [each for each in map(tuner.evaluate, tuner.combinations()) if each]
    current = tuner.evaluate(tuner.current)
    if current:
        found.append(current)
    fitting = [each for each in found if each.fits]
    if not fitting:
        least = min(found, key=lambda each: each.memory)
        raise ConfigError(
            f"the model does not fit: at hybrid_shard_degree = "
            f"{least.settings['hybrid_shard_degree']} a rank needs {least.memory / 2**30:.2f} GiB "
            f"and has {memory / 2**30:.2f}. Start more ranks, or lower batch.micro_batch_size."
        )
    fastest = min(each.seconds for each in fitting)
    near = [each for each in fitting if each.seconds <= fastest * (1 + WORTH)]
    chosen = min(near, key=lambda each: (tuner.changes(each), each.seconds, each.memory))
    measured = []
    if measure and finalists:
        first = [chosen, *(each for each in _best_kept(fitting) if not _same_kept(each, chosen))]
        first = first[:finalists]
        if current and current.fits and not any(_same_kept(each, current) for each in first):
            first.append(current)
        seconds = measure([_with_parallel(config, each.settings) for each in first])
        measured = [
            dataclasses.replace(each, measured=one)
            for each, one in zip(first, seconds, strict=True)
        ]
        limit = min(seconds) * (1 + WORTH)
        near = [each for each in measured if each.measured <= limit]
        chosen = min(near, key=lambda each: (tuner.changes(each), each.measured))
    settings = [*(tuner.setting(key, found, chosen) for key in KEYS), tuner.bucket_setting(chosen)]
    if budget != "auto":
        reason = "sdp_max_live_parameters limits the same memory"
        settings.append(TunedSetting("memory_budget", "auto", budget, reason))
    if current and not current.fits:
        current = None
    return TuneResult(config, cluster, memory, found, chosen, current, settings, measured)


@dataclass(frozen=True)
class _Tuner:
    """Evaluates combinations of settings: see `choose_settings`."""

    config: TrainConfig
    cluster: Cluster
    memory: int
    vocabulary: int
    backend: str

    @property
    def current(self) -> dict[str, Any]:
        """Values of `KEYS` in the config, with degree and backend resolved."""
        values = {key: getattr(self.config.parallel, key) for key in KEYS}
        values["hybrid_shard_degree"] = self.config.parallel.widest.sharing or self.cluster.world
        values["communication_backend"] = self.backend
        return values

    @property
    def sizes(self) -> list[int]:
        """Parameters of the root unit and of every block."""
        return unit_parameters(self.config, self.cluster.world, self.vocabulary)

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Yield all values of `KEYS` to evaluate."""
        current, sizes = self.current, self.sizes
        rows = self.cluster.node.collectives
        names = list(dict.fromkeys(row.backend for row in rows)) or [self.backend]
        for degree in divisors(self.cluster.world):
            if degree == 1:  # nothing is gathered
                yield from (
                    current | {"hybrid_shard_degree": 1, "communication_backend": name}
                    for name in names
                )
                continue
            modes = {current["hierarchical_all_gather"]: None}
            if self._spans_nodes(degree):
                modes |= {"off": None, "on": None}
            for backend in names:
                for mode in modes:
                    for depth in self._depths(current["prefetch_depth"]):
                        for live in self._live_parameters(sizes, depth):
                            values = degree, backend, mode, depth, live
                            yield dict(zip(KEYS, values, strict=True))

    def evaluate(self, settings: dict[str, Any]) -> TunedCandidate | None:
        """Predict time and memory with ``settings``; None if the trainer rejects them."""
        cluster = self.cluster
        try:
            config = _with_parallel(self.config, settings)
            work = workload_from_config(
                config, cluster.world, cluster.node.gpus, self.vocabulary, cluster.gpu.is_cpu
            )
            seconds = step_time(work, cluster, constants_for(cluster.node)).seconds
            found = estimate(config, cluster.world, vocabulary=self.vocabulary)
        except ConfigError:
            return None
        # the reserve is for CUDA's context and allocator
        memory = found.peak if cluster.gpu.is_cpu else found.total
        return TunedCandidate(settings, seconds, memory, memory <= self.memory)

    def changes(self, candidate: TunedCandidate) -> int:
        """Number of settings that differ from the config."""
        current = self.current
        return sum(candidate.settings[key] != current[key] for key in KEYS)

    def setting(
        self, key: str, found: list[TunedCandidate], chosen: TunedCandidate
    ) -> TunedSetting:
        """Return one chosen setting, with the best step time of every value as the reason."""
        value, previous = chosen.settings[key], getattr(self.config.parallel, key)
        if value == self.current[key]:  # keep it as it is written, "auto" for example
            value = previous
        parts, too_large = [], []
        for other in dict.fromkeys(each.settings[key] for each in found):
            same = [each for each in found if each.settings[key] == other]
            fitting = [each.seconds for each in same if each.fits]
            if fitting:
                parts.append(f"{json.dumps(other)}: {min(fitting) * 1e3:.4g} ms")
            else:
                too_large.append(json.dumps(other))
        reason = "the only possible value"
        if len(parts) + len(too_large) > 1:
            reason = "predicted step time by value: " + ", ".join(parts)
            if too_large:
                reason += f"; does not fit: {', '.join(too_large)}"
        return TunedSetting(key, value, previous, reason)

    def bucket_setting(self, chosen: TunedCandidate) -> TunedSetting:
        """Limit the gradients in flight to `BUCKET_SHARE` of the free memory."""
        key = "sdp_reduce_bucket_size"
        previous = getattr(self.config.parallel, key)
        overlaps = self.cluster.gpu.is_cpu and self.config.parallel.overlap_communication
        if not overlaps or chosen.settings["hybrid_shard_degree"] == 1:
            reason = "no effect: only used for reductions overlapped with compute on the CPU"
            return TunedSetting(key, previous, previous, reason)
        free = max(0, self.memory - chosen.memory)
        allowed = int(BUCKET_SHARE * free) // REDUCED_BYTES
        room = f"{BUCKET_SHARE:.0%} of the free memory"
        if min(previous, sum(self.sizes)) <= allowed:
            return TunedSetting(key, previous, previous, f"its gradients fit in {room}")
        reason = f"the gradients of {allowed:,} parameters fit in {room}"
        return TunedSetting(key, allowed, previous, reason)

    def _spans_nodes(self, degree: int) -> bool:
        """True if a shard group has several ranks on several nodes, for two-stage all-gathers."""
        parallel = dataclasses.replace(self.config.parallel, hybrid_shard_degree=degree)
        mesh = Mesh.from_config(parallel, self.cluster.world, self.cluster.node.gpus)
        group = rank_group(mesh, "shard", "context")
        return group.nodes > 1 and group.on_node > 1

    def _depths(self, current: int) -> list[int]:
        blocks = len(self.sizes) - 1
        return sorted({current, *range(1, max(2, min(MAX_PREFETCH, blocks - 1) + 1))})

    def _live_parameters(self, sizes: list[int], depth: int) -> list[int]:
        """Return limits of live parameters for none, a quarter, half and all blocks resident."""
        root, *blocks = sizes
        current = self.current["sdp_max_live_parameters"]
        limits = {current, 0, sum(sizes)}
        for resident in (len(blocks) // 4, len(blocks) // 2):
            if resident:
                moving = (1 + depth) * max(blocks)
                limits.add(min(sum(sizes), root + sum(blocks[:resident]) + moving))
        return sorted(limits)


def _with_parallel(config: TrainConfig, values: dict[str, Any]) -> TrainConfig:
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **values))


def _best_by_layout(candidates: list[TunedCandidate]) -> list[TunedCandidate]:
    """Return the best candidate of every degree and backend, degrees ascending."""
    best: dict[tuple, TunedCandidate] = {}
    for each in candidates:
        key = each.settings["hybrid_shard_degree"], each.settings["communication_backend"]
        order = (not each.fits, each.seconds, each.memory)
        if key not in best or order < (not best[key].fits, best[key].seconds, best[key].memory):
            best[key] = each
    return [best[key] for key in sorted(best)]


def _kept(candidate: TunedCandidate) -> tuple:
    """Return the settings with large effects: degree, backend and limit of live parameters."""
    degree, backend, _, _, live = (candidate.settings[key] for key in KEYS)
    return degree, backend, live


def _same_kept(first: TunedCandidate, second: TunedCandidate) -> bool:
    return _kept(first) == _kept(second)


def _best_kept(candidates: list[TunedCandidate]) -> list[TunedCandidate]:
    """Return the fastest prediction of every `_kept`, the fastest first."""
    best: dict[tuple, TunedCandidate] = {}
    for each in sorted(candidates, key=lambda each: (each.seconds, each.memory)):
        best.setdefault(_kept(each), each)
    return list(best.values())


def _format_setting(setting: TunedSetting) -> str:
    value, previous = json.dumps(setting.value), json.dumps(setting.previous)
    was = "unchanged" if value == previous else f"was {previous}"
    return f"  {setting.key} = {value} ({was}): {setting.reason}"
