"""The trainer's step can be read top to bottom: one short function, few files."""

import inspect
import sys
from pathlib import Path

import nearlinear as nl

PACKAGE = Path(nl.__file__).parent

MAX_LINES = 60
MAX_FILES = 22
MAX_FILES_OF_TRAINER = 5
OF_THE_TEST = {"distributed/thread_backend.py", "context_parallel/masks.py"}
"""Process group of ranks that are threads; ranks on a cluster are processes. Mask functions that
pass on calls after a model with context parallelism was built in the same process."""


def test_step_is_one_function_of_at_most_60_lines():
    assert len(inspect.getsource(nl.Trainer.step).splitlines()) <= MAX_LINES


def files_of_a_step(rank: int, config: dict) -> set[str]:
    """Files of nearlinear that the second step enters on the thread of training."""
    trainer = nl.Trainer(config)
    trainer.step()
    files = set()

    def enter(frame, event, argument):
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(enter)
    trainer.step()
    sys.setprofile(None)
    trainer.reporter.close()
    inside = {Path(file) for file in files if Path(file).is_relative_to(PACKAGE)}
    return {path.relative_to(PACKAGE).as_posix() for path in inside} - OF_THE_TEST


def test_step_of_two_replicas_and_two_shards_enters_few_files(small_run):
    config = small_run | {"parallel": {"hybrid_shard_degree": 2}}
    files = set.union(*nl.spmd.run(files_of_a_step, 4, args=(config,)))
    assert len(files) <= MAX_FILES, " ".join(sorted(files))
    of_trainer = {file for file in files if file.startswith("train/")}
    assert len(of_trainer) <= MAX_FILES_OF_TRAINER, sorted(of_trainer)
