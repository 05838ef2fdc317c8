"""The trainer's step can be read top to bottom: one short function, few files."""

import inspect
import sys
from pathlib import Path

import nearlinear as nl
from nearlinear import train

MAX_LINES = 60
MAX_FILES = 5


def test_step_is_one_function_of_at_most_60_lines():
    assert len(inspect.getsource(nl.Trainer.step).splitlines()) <= MAX_LINES


def test_step_enters_at_most_five_files_of_train(small_run):
    folder = Path(train.__file__).parent

    def work(rank):
        trainer = nl.Trainer(small_run)
        trainer.step()
        files = set()

        def enter(frame, event, argument):
            if event == "call":
                files.add(frame.f_code.co_filename)

        sys.setprofile(enter)
        trainer.step()
        sys.setprofile(None)
        trainer.reporter.close()
        inside = {Path(file) for file in files if Path(file).is_relative_to(folder)}
        return {path.relative_to(folder).as_posix() for path in inside}

    for files in nl.spmd.run(work, 2):
        assert len(files) <= MAX_FILES, sorted(files)
