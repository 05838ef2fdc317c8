"""Number of files that one plain training step enters."""

import sys
from pathlib import Path

import nearlinear as nl
from tests.support import tiny
from tests.support.releases import needs_hooks

PACKAGE = Path(nl.__file__).parent
FOLDERS = ("fsdp", "_torch", "distributed/collectives.py")
LIMIT = 9


def files_of_a_step(rank: int) -> set[str]:
    """Files of sharding that the second step enters, on any thread of the rank."""
    nl.init({"hybrid_shard_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2(2)
    nl.shard(model)
    optimizer = tiny.optimizer_for(model, "adamw")
    files: set[str] = set()

    def enter(frame, event, argument):
        if event == "call":
            files.add(frame.f_code.co_filename)

    for number in range(2):
        if number == 1:
            sys.setprofile(enter)
        for batch in nl.accumulate(model, [tiny.batch(tiny.rows(rank, 2))] * 2):
            model(**batch).loss.backward()
        nl.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    sys.setprofile(None)
    inside = {Path(file) for file in files if Path(file).is_relative_to(PACKAGE)}
    names = {path.relative_to(PACKAGE).as_posix() for path in inside}
    return {name for name in names if name.startswith(FOLDERS)}


@needs_hooks
def test_a_plain_step_enters_at_most_nine_files_of_sharding():
    files = set.union(*nl.spmd.run(files_of_a_step, 4))
    assert len(files) <= LIMIT, sorted(files)
