"""The same splits under datatrove's executors: on this machine, on Slurm, on Ray.

The job is planned here and written to the folder of the unfinished output, which all hosts see.
Each task does its share of the splits; one task more, after them, merges. What is done is not done
again, whatever the engine; the bytes are those of `prepare`.
"""

from contextlib import nullcontext
from itertools import takewhile
from pathlib import Path

from datatrove.data import DocumentsPipeline
from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep

from data_prep import output, places
from data_prep.backends import BACKENDS, encoder
from data_prep.job import Job
from data_prep.places import Place
from data_prep.records import add_new, record_of
from data_prep.settle import enough, limited, reached
from data_prep.work import do_split
from nearlinear.errors import DataError


class DoSplits(PipelineStep):
    """A step that does every `world_size`th split of the job in `folder`, from `rank` on.

    It ends early when those that are done before its next one reach a limit.
    """

    type, name = "Tokenizer", "nearlinear splits"

    def __init__(self, folder: str | Place, backends: tuple[str, ...] = BACKENDS):
        super().__init__()
        self.folder, self.backends = str(folder), backends

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yields nothing: what it makes are files."""
        folder = places.at(self.folder)
        job, before = Job.load(folder), {}
        for number in range(rank, len(job.splits), world_size):
            if limited(job):
                add_new(before, folder, job, number)
                if reached(job, before.values()):
                    break
            if record_of(folder, job, number) is None:
                with self.track_time("split"):
                    record = do_split(job, number, folder, encoder(job.words, self.backends))
                self.stat_update("documents", value=record["documents"])
                self.stat_update("tokens", value=record["tokens"], unit="split")
        yield from data or ()


class MergeSplits(PipelineStep):
    """A step of one task that merges the finished splits in `folder` and publishes them at `out`.

    With `alone` nobody waits for it who holds the lock. Raises `DataError` when a split is not done
    that is needed.
    """

    type, name = "Tokenizer", "nearlinear merge"

    def __init__(self, folder: str | Place, out: str | Place, alone: bool = False):
        super().__init__()
        self.folder, self.out, self.alone = str(folder), str(out), alone

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yields nothing; only the first task does anything."""
        if rank == 0:
            with output.merging(self.out) if self.alone else nullcontext():
                self._merge(places.at(self.folder))
        yield from data or ()

    def _merge(self, folder: Place) -> None:
        job = Job.load(folder)
        found = (record_of(folder, job, number) for number in range(len(job.splits)))
        records = list(takewhile(bool, found))
        if not enough(job, records):
            raise DataError(
                f"split {len(records)} of {folder} is not done: look into "
                f"{_logs(places.at(self.out))}, and run the same command again"
            )
        output.finish(job, folder, records, self.out)


def launch(engine: str, folder: Place, out: Place, tasks: int, backends: tuple[str, ...] = BACKENDS,
           **options) -> None:  # fmt: skip
    """Run, or on Slurm submit, the job in `folder` as `tasks` tasks and a merge after them.

    `options` are those of datatrove's executor: `time` and `partition` on Slurm. Raises
    `DataError` for an engine that is not known or not installed, and for options it does not take.
    """
    executor = _executor(engine)
    many, one = ({"workers": tasks}, {"workers": 1}) if engine == "local" else ({}, {})
    try:
        work = executor(
            [DoSplits(folder, backends)],
            tasks=tasks,
            logging_dir=str(_logs(out) / "splits"),
            skip_completed=False,
            **{**many, **options},
        )
        last = executor(
            [MergeSplits(folder, out, alone=engine == "slurm")],
            tasks=1,
            logging_dir=str(_logs(out) / "merge"),
            skip_completed=False,
            depends=work,
            **{**options, **one},
        )
    except TypeError as error:
        raise DataError(f"datatrove's {engine} executor: {error}; see --engine-option") from None
    last.run()


def _logs(out: Place) -> Path:
    """Where the executors keep what they say, and which task is done: OUT.logs.

    For an output in a bucket it is a folder of that name here, which the tasks see.
    """
    beside = places.beside(out, ".logs")
    return beside.path or Path(beside.name).absolute()


def _executor(engine: str):
    if engine == "ray":
        try:
            import ray  # noqa: F401
        except ModuleNotFoundError:
            raise DataError(
                "the engine ray needs Ray: run `pip install 'datatrove[ray]'`, or use another"
            ) from None
        from datatrove.executor import RayPipelineExecutor

        return RayPipelineExecutor
    engines = {"local": LocalPipelineExecutor, "slurm": SlurmPipelineExecutor}
    if engine not in engines:
        raise DataError(f"no engine {engine!r}: use local, slurm or ray")
    return engines[engine]
