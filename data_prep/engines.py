"""Process input splits under datatrove's executors: on this machine, on Slurm, or on Ray.

The plan is written to the folder of the unfinished output, which all hosts must see. Each task
processes its share of the input splits, and one more task merges them. Finished splits are reused
with any engine, and the bytes are those of `prepare` without one.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep

from data_prep import output
from data_prep.assign_splits import has_limit, is_complete, limit_reached
from data_prep.encoders import BACKENDS, get_encoder
from data_prep.plan import PreparationPlan
from data_prep.process_split import process_split
from data_prep.resume import add_new_records, read_record
from data_prep.storage_paths import absolute_path
from nearlinear.errors import DataError
from nearlinear.storage import StoragePath


class ProcessSplits(PipelineStep):
    """Pipeline step that processes every `world_size`th input split, starting at `rank`.

    The step ends early when the splits before its next one reach a limit.
    """

    type, name = "Tokenizer", "nearlinear splits"

    def __init__(self, folder: str | StoragePath, backends: tuple[str, ...] = BACKENDS):
        super().__init__()
        self.folder, self.backends = str(folder), backends

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Process the splits of this rank; yields no documents."""
        folder = absolute_path(self.folder)
        plan = PreparationPlan.load(folder)
        earlier: dict[int, dict[str, Any]] = {}
        for number in range(rank, len(plan.splits), world_size):
            if has_limit(plan):
                add_new_records(earlier, folder, plan, number)
                if limit_reached(plan, earlier.values()):
                    break
            if read_record(folder, plan, number) is None:
                encoder = get_encoder(plan.tokenizer, self.backends)
                with self.track_time("split"):
                    record = process_split(plan, number, folder, encoder)
                self.stat_update("documents", value=record["documents"])
                self.stat_update("tokens", value=record["tokens"], unit="split")
        yield from data or ()


class MergeSplits(PipelineStep):
    """Pipeline step of one task that merges the finished splits and publishes them at `out`.

    Args:
        takes_lock: Acquire the lock of the output, because no waiting process holds it.

    Raises `DataError` if a required split is missing.
    """

    type, name = "Tokenizer", "nearlinear merge"

    def __init__(self, folder: str | StoragePath, out: str | StoragePath, takes_lock: bool = False):
        super().__init__()
        self.folder, self.out, self.takes_lock = str(folder), str(out), takes_lock

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Merge on rank 0; yields no documents."""
        if rank == 0:
            with output.merging(self.out) if self.takes_lock else nullcontext():
                self._merge(absolute_path(self.folder))
        yield from data or ()

    def _merge(self, folder: StoragePath) -> None:
        plan = PreparationPlan.load(folder)
        records = []
        for number in range(len(plan.splits)):
            record = read_record(folder, plan, number)
            if not record:
                break
            records.append(record)
        if not is_complete(plan, records):
            raise DataError(
                f"split {len(records)} of {folder} is not done: read its logs in "
                f"{output.logs_folder(self.out)}, then run the same command again"
            )
        output.publish(plan, folder, records, self.out)


def launch(
    engine: str,
    folder: StoragePath,
    out: StoragePath,
    tasks: int,
    backends: tuple[str, ...] = BACKENDS,
    **options: Any,
) -> None:
    """Run the plan in `folder` as `tasks` tasks and a merge, or submit them on Slurm.

    Args:
        options: Options of datatrove's executor, such as `time` and `partition` on Slurm.

    Raises:
        DataError: The engine is unknown or not installed, or rejects an option.
    """
    executor = _executor_class(engine)
    split_workers, merge_workers = (
        ({"workers": tasks}, {"workers": 1}) if engine == "local" else ({}, {})
    )
    try:
        splits = executor(
            [ProcessSplits(folder, backends)],
            tasks=tasks,
            logging_dir=str(output.logs_folder(out) / "splits"),
            skip_completed=False,
            **{**split_workers, **options},
        )
        merge = executor(
            [MergeSplits(folder, out, takes_lock=engine == "slurm")],
            tasks=1,
            logging_dir=str(output.logs_folder(out) / "merge"),
            skip_completed=False,
            depends=splits,
            **{**options, **merge_workers},
        )
    except TypeError as error:
        raise DataError(f"datatrove's {engine} executor: {error}; see --engine-option") from None
    merge.run()


def _executor_class(engine: str) -> Any:
    if engine == "ray":
        try:
            import ray  # noqa: F401  # pyright: ignore[reportMissingImports] - optional
        except ModuleNotFoundError:
            raise DataError(
                "engine ray needs Ray: run `pip install 'datatrove[ray]'`, or use another engine"
            ) from None
        from datatrove.executor import RayPipelineExecutor

        return RayPipelineExecutor
    engines = {"local": LocalPipelineExecutor, "slurm": SlurmPipelineExecutor}
    if engine not in engines:
        raise DataError(f"no engine {engine!r}: use local, slurm or ray")
    return engines[engine]
