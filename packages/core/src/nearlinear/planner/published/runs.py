"""Published training runs as workloads on clusters, with their measured step times.

The tables are in ``planner/data``. A row that is not a step of a known model on known machines, or
that repeats a run in another unit, is skipped with a reason.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...distributed.mesh import Mesh
from ...errors import ConfigError
from ..cluster import Cluster
from ..workload import Workload
from . import blog_posts, columns
from .columns import SAME_RUN, RunValues, Values
from .models import MEGATRON_VOCABULARY, gpt, mpt, published_cluster

DATA = Path(__file__).parents[1] / "data"
POSTS, HELD_OUT_POSTS = DATA / "framework_posts.csv", DATA / "later_posts.csv"


@dataclass(frozen=True)
class PublishedRow:
    """A row of a table."""

    file: str
    line: int
    """Line in the file; line 1 names the columns."""
    source: str
    values: dict[str, str]


@dataclass(frozen=True)
class PublishedRun:
    """A row that can be modelled."""

    row: PublishedRow
    work: Workload
    cluster: Cluster
    value: float
    """Published seconds per step; bytes, if the row has a peak of memory."""

    def same_step(self, other: "PublishedRun") -> bool:
        """True if both rows of a source describe the same workload and machines."""
        return (self.source, self.work, self.cluster) == (other.source, other.work, other.cluster)

    @property
    def source(self) -> str:
        return self.row.source

    @property
    def title(self) -> str:
        values = self.row.values
        return values.get("model") or f"GPT {values['Parameters (billion)']}B"


@dataclass(frozen=True)
class SkippedRow:
    """A row that cannot be modelled."""

    row: PublishedRow
    reason: str


def published_runs() -> list[PublishedRun]:
    """Return the rows that are modelled."""
    return [each for each in all_rows() if isinstance(each, PublishedRun)]


def skipped_rows() -> list[SkippedRow]:
    """Return the rows that are not modelled."""
    return [each for each in all_rows() if isinstance(each, SkippedRow)]


def all_rows() -> list[PublishedRun | SkippedRow]:
    """Return every row of every table, in order."""
    return [
        *_read(DATA / "llm_foundry.csv", _foundry_source, _foundry),
        *_read(DATA / "vtrain.csv", lambda values: "vTrain, Megatron-LM", _vtrain),
        *_read(POSTS, blog_posts.source_name, blog_posts.read_row),
    ]


def held_out_rows() -> list[PublishedRun | SkippedRow]:
    """Return every row of the tables that no constant is fitted to."""
    return [
        *_read(DATA / "held_out.csv", _foundry_source, _foundry),
        *read_table(HELD_OUT_POSTS),
    ]


def held_out_runs() -> list[PublishedRun]:
    """Return the rows that are modelled, of the tables that no constant is fitted to."""
    return [each for each in held_out_rows() if isinstance(each, PublishedRun)]


def published_peaks() -> list[PublishedRun]:
    """Return the rows with a peak of memory; their values are bytes."""
    rows = (
        *_read(POSTS, blog_posts.source_name, columns.read_peak),
        *_read(HELD_OUT_POSTS, _stated_source, columns.read_peak),
    )
    return [each for each in rows if isinstance(each, PublishedRun)]


def read_table(path: Path) -> list[PublishedRun | SkippedRow]:
    """Read a table in the documented format (``planner/data/README.md``).

    Raises ConfigError if the file cannot be read or lacks columns.
    """
    try:
        return list(_read(path, _stated_source, columns.read_row, columns.COLUMNS))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _stated_source(values: Values) -> str:
    return values["source"]


def _read(
    path: Path,
    source: Callable[[Values], str],
    read: Callable[[Values], RunValues | str],
    needed: Sequence[str] = (),
) -> Iterator[PublishedRun | SkippedRow]:
    """Read a table, each row with ``read``. A run that a source states in a second unit is skipped.

    Args:
        path: A CSV file.
        source: Returns the source of a row.
        read: Returns workload, cluster and value of a row, or the reason to skip it.
        needed: Columns without which the table is refused.
    """
    with open(path, encoding="utf-8", newline="") as lines:
        table = csv.DictReader(lines, restval="")
        if absent := [name for name in needed if name not in (table.fieldnames or ())]:
            raise ConfigError(f"{path} has no column {', '.join(absent)}")
        runs: list[tuple[PublishedRun, str]] = []
        for line, values in enumerate(table, start=2):
            row = PublishedRow(path.name, line, source(values), values)
            try:
                found = read(values)
            except (KeyError, ValueError, ArithmeticError, ConfigError) as error:
                found = f"a column cannot be read ({error})"
            if isinstance(found, str):
                yield SkippedRow(row, found)
                continue
            run, unit = PublishedRun(row, *found), values.get("metric", "")
            if any(unit != other_unit and run.same_step(other) for other, other_unit in runs):
                yield SkippedRow(row, SAME_RUN)
                continue
            runs.append((run, unit))
            yield run


FOUNDRY_GPU = {"a100_40gb": "A100-40GB", "a100_80gb": "A100-80GB", "h100_80gb": "H100-80GB"}
FOUNDRY_GBPS = {"a100": 1600, "h100": 3200}


def _foundry_source(values: dict[str, str]) -> str:
    return f"llm-foundry, {FOUNDRY_GPU[values['gpu']]}"


def _foundry(values: dict[str, str]) -> RunValues:
    """FSDP with flash attention; PURE reduces gradients in bfloat16, DEFAULT in float32."""
    sequence, gpus = int(values["seq_len"]), int(values["gpus"])
    work = Workload(
        shape=mpt(values["model"], sequence),
        sequence=sequence,
        micro_batch=int(values["micro_bs"]),
        micro_batches=int(values["grad_accum"]),
        mesh=Mesh(shard=gpus, ranks_per_node=8),
        recompute="block" if values["act_ckpt"] == "True" else "none",
        reduce_bytes=2.0 if values["mp_mode"] == "PURE" else 4.0,
        fp8=values["precision"] == "amp_fp8",
    )
    cluster = published_cluster(
        FOUNDRY_GPU[values["gpu"]], gpus, 8, FOUNDRY_GBPS[values["gpu"][:4]]
    )
    return work, cluster, work.step_tokens / gpus / float(values["tokens_s_gpu"])


def _vtrain(values: dict[str, str]) -> RunValues | str:
    """Megatron-LM with full recomputation on 80 GB A100s, four 200 Gbit/s adapters per node."""
    sequence, gpus = int(values["sequence length"]), int(values["# GPUs"])
    data = int(values["data parallelism"])
    micro_batch, batch = int(values["micro batch"]), int(values["global batch"])
    mesh = Mesh(
        pipeline=int(values["pipeline parallelism"]),
        replicate=data,
        tensor=int(values["tensor parallelism"]),
        ranks_per_node=8,
    )
    if mesh.world != gpus:
        return f"its parallel degrees give {mesh.world} ranks, not {gpus}"
    shape = gpt(
        int(values["# layers"]),
        int(values["hidden size"]),
        int(values["attention heads"]),
        MEGATRON_VOCABULARY,
        sequence,
    )
    work = Workload(
        shape=shape,
        sequence=sequence,
        micro_batch=micro_batch,
        micro_batches=batch // (data * micro_batch),
        mesh=mesh,
        recompute="block",
        **columns.MEGATRON.fields,
    )
    return (
        work,
        published_cluster("A100-80GB", gpus, 8, 800),
        float(values["iteration time (ms)"]) / 1e3,
    )
