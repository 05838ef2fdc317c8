"""A rank that dies, hangs or fails is named on all others: which, where, at what, since when."""

import re
import threading

import pytest
import torch.distributed as dist

import nearlinear as nl
from nearlinear.spmd.failures import RankError
from nearlinear.watchdog import dog
from nearlinear.watchdog.beat import Beat
from nearlinear.watchdog.judge import Limits, Seen, judge

LIMITS = Limits(hung=100.0, silent=30.0, setting="train.rank_timeout")


def seen(count=7, still=200.0, unheard=0.0, gone=False, **changes) -> Seen:
    words = {
        "number": 3, "host": "node-a", "pid": 41, "house": "", "doing": f"operation {count}",
        "place": 0, "patience": 1.0, "waits": True, "at": "",
    }  # fmt: skip
    return Seen(Beat(**words | {"count": count, "still": still} | changes), unheard, gone)


def verdict(*ranks: Seen, comparable: bool = True) -> tuple | None:
    found = judge(ranks, LIMITS, comparable)
    return found and (found.kind, found.rank)


BUSY = {"waits": False}
CASES = {
    "well": ([seen(still=3), seen(still=1)], None),
    "all slow alike, as when they compile": ([seen(**BUSY), seen(**BUSY)], None),
    "behind": ([seen(8), seen(7, **BUSY), seen(8)], ("hung", 1)),
    "behind, in a collective that nobody else is in": ([seen(8), seen(7), seen(8)], ("hung", 1)),
    "behind, and going on": ([seen(8), seen(7, still=2, **BUSY)], None),
    "behind, and others go on": ([seen(8, still=2), seen(7, **BUSY)], None),
    "behind, at what may take longer": ([seen(8), seen(7, patience=4.0, **BUSY)], None),
    "not waiting": ([seen(), seen(), seen(**BUSY)], ("hung", 2)),
    "an earlier block": ([seen(place=4), seen(place=3), seen(place=4)], ("hung", 1)),
    "an earlier block, seen from accelerators": (
        [seen(place=4, **BUSY), seen(place=3, **BUSY)],
        ("hung", 1),
    ),
    "all wait at the same": ([seen(), seen()], ("deadlock", None)),
    "dead": ([seen(still=1), seen(still=1, unheard=31)], ("silent", 1)),
    "dead, as its host knows": ([seen(still=1), seen(still=1, gone=True)], ("silent", 1)),
    "quiet for a while": ([seen(still=1), seen(still=1, unheard=29)], None),
    "left, and it is done": ([seen(still=1), seen(left=True, unheard=1e6, gone=True)], None),
    "left too early": ([seen(), seen(left=True, unheard=1e6)], ("left", 1)),
    "left, while one of the others hangs": ([seen(**BUSY), seen(), seen(left=True)], ("hung", 0)),
    "not begun": ([seen(still=1), Seen(None, 101)], ("silent", 1)),
    "about to begin": ([seen(still=1), Seen(None, 99)], None),
}


@pytest.mark.parametrize("case", CASES)
def test_who_holds_up_the_others(case):
    ranks, expected = CASES[case]
    assert verdict(*ranks) == expected


def test_stages_of_a_pipeline_have_other_blocks():
    ranks = [seen(place=4, **BUSY), seen(place=3, **BUSY)]
    assert verdict(*ranks, comparable=False) is None
    assert verdict(*[seen(place=4), seen(place=3)], comparable=False) == ("deadlock", None)


def test_what_is_said():
    others = seen(8, at="all_reduce, train/trainer.py:3 in step")
    text = judge([others, seen(7, at="my/data.py:8 in read", **BUSY)], LIMITS).text
    assert re.fullmatch(
        r"rank 1 on node-a hangs at operation 7 \(my/data.py:8 in read\), since \d\d:\d\d:\d\d "
        r"\(200 s\), and others wait for it, as rank 0 does at operation 8 \(all_reduce, "
        r"train/trainer.py:3 in step\): look there, or raise train.rank_timeout if it may take "
        r"longer than 100 s",
        text,
    )
    text = judge([seen(still=1), seen(still=1, unheard=31)], LIMITS).text
    assert "rank 1 on node-a is not heard of, or has died, at operation 7, since" in text
    assert "(32 s)" in text


class Stuck:
    """What a rank hangs in, until the others have been told."""

    def __init__(self):
        self.released = threading.Event()

    def wait_in_user_code(self) -> None:
        assert self.released.wait(120)


def ends_with(work, ranks: int = 3) -> str:
    with pytest.raises(RankError) as caught:
        nl.spmd.run(work, ranks, timeout=120)
    return str(caught.value).splitlines()[0]


def test_a_rank_stuck_in_code_of_its_own_is_named_on_all_others():
    stuck, said = Stuck(), {}

    def work(rank):
        nl.init()
        try:
            with nl.watch_ranks(timeout=4, setting="the timeout") as watch:
                for step in range(3):
                    watch.at(f"step {step}, loading a batch")
                    if rank == 1 and step == 2:
                        stuck.wait_in_user_code()
                    watch.at(f"step {step}, adding up")
                    dist.barrier()
        except nl.RankLost as error:
            said[rank] = str(error)
            if len(said) == 2:
                stuck.released.set()
            raise

    ends_with(work)
    assert said.keys() >= {0, 2}
    for text in said.values():
        assert re.search(
            r"rank 1 on \S+ hangs at step 2, loading a batch \(core/test_watchdog.py:\d+ in "
            r"wait_in_user_code\), since .* others wait for it, as rank 0 does at step 2, adding "
            r"up \(barrier, .*: look there, or raise the timeout",
            text,
        )


def test_collectives_that_do_not_match_are_told_of_all_ranks():
    """Nobody is behind: all do the same thing, and one does it with the wrong ranks."""

    def work(rank):
        nl.init()
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
        with nl.watch_ranks(timeout=3) as watch:
            watch.at("the exchange")
            dist.barrier(pairs[rank])

    text = ends_with(work)
    assert "all ranks wait for each other for" in text
    assert len(re.findall(r"rank \d on \S+ at the exchange \(barrier, ", text)) == 3


def test_a_rank_that_fails_is_named_on_all_others():
    said = {}

    def work(rank):
        nl.init()
        try:
            with nl.watch_ranks(on_alarm=lambda alarm, steady: f"and {steady}") as watch:
                watch.at("step 5")
                if rank == 1:
                    raise ValueError("out of luck\nand more")
                dist.barrier()
        except nl.RankLost as error:
            said[rank] = str(error), error.exit_code
            raise

    assert ends_with(work) == "rank 1 of 3 failed: ValueError: out of luck"
    assert said.keys() == {0, 2}
    for words, code in said.values():
        assert re.fullmatch(
            r"rank 1 on \S+ has failed at step 5: ValueError: out of luck; and True", words
        )
        assert code == 1


def test_an_answer_to_an_alarm_that_gets_stuck_keeps_nobody(monkeypatch):
    monkeypatch.setattr(dog, "HANDLING", 0.2)
    stuck, said = Stuck(), {}

    def work(rank):
        nl.init()
        try:
            with nl.watch_ranks(on_alarm=lambda *_: stuck.wait_in_user_code()) as watch:
                watch.at("step 5")
                if rank == 1:
                    raise ValueError("out of luck")
                dist.barrier()
        except nl.RankLost as error:
            said[rank] = str(error)
            raise

    assert ends_with(work, 2) == "rank 1 of 2 failed: ValueError: out of luck"
    stuck.released.set()
    assert said[0].endswith("out of luck; what was to be done then was not done after 0 s")


def test_ranks_that_are_well_leave_when_they_like():
    """One after the other, and the next watch begins anew."""

    def work(rank):
        nl.init()
        watches = nl.watch_ranks(timeout=3), nl.watch_ranks(timeout=3)
        for watch in (*watches, watches[0]):
            with watch:
                with watch.changing("a little work"):
                    dist.barrier()
                threading.Event().wait(0.2 * rank)

    nl.spmd.run(work, 3)
