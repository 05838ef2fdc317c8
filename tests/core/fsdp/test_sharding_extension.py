"""A `ShardingExtension` takes part in `nl.shard` and in every step."""

import contextlib

import nearlinear as nl
from nearlinear.fsdp.model_state import ShardingExtension, model_state
from tests.support import tiny


class Recorder(ShardingExtension):
    """An extension whose reducer records the calls of a step."""

    def __init__(self):
        self.calls: list[str] = []

    def partial_gradients(self, model, runtime):
        assert runtime is model_state(model).runtime
        return [self]

    def begin(self) -> None:
        self.calls.append("begin")

    def reduce(self) -> None:
        self.calls.append("reduce")

    def abandon(self) -> None:
        self.calls.append("abandon")


def calls_of(rank: int) -> dict[str, list[str]]:
    nl.init()
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2(1)
    extension = Recorder()
    model_state(model).extensions.append(extension)
    nl.shard(model)
    assert model_state(model).extension(Recorder) is extension
    batch, found = tiny.batch(tiny.rows(rank, 1)), {}

    def record(name: str) -> None:
        found[name] = list(extension.calls)
        extension.calls.clear()

    for micro_batch in nl.accumulate(model, [batch] * 3):
        model(**micro_batch).loss.backward()
    record("step")
    model(**batch).loss.backward()
    record("backward outside of accumulate")
    loop = nl.accumulate(model, [batch] * 3)
    with contextlib.closing(loop):
        model(**next(loop)).loss.backward()
    record("unfinished step")
    return found


def test_partial_gradients_of_an_extension_are_reduced_once_per_step():
    expected = {
        "step": ["begin", "reduce"],
        "backward outside of accumulate": ["begin", "reduce"],
        "unfinished step": ["begin", "abandon"],
    }
    assert nl.spmd.run(calls_of, 2) == [expected] * 2
