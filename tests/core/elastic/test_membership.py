"""The replicas of a job agree on every step, whoever is lost between their votes."""

import socket
import threading
import time

import pytest

from nearlinear.elastic.membership import LOST_GROUP, Decision, Membership
from nearlinear.elastic.peers import Peers
from nearlinear.errors import RankFailure

SILENCE = 2.0


class Job:
    """The first ranks of ``count`` replicas, as threads of this process."""

    def __init__(self, folder, count: int, minimum: int = 1, silence: float = SILENCE):
        self.folder = folder
        self.addresses = [("127.0.0.1", port) for port in free_ports(count)]
        self.minimum, self.silence, self.started = minimum, silence, 0
        self.ranks: dict[int, Membership] = {}

    def start(self, replica: int) -> Membership:
        losses = []
        self.started += 1
        peers = Peers(
            replica, self.addresses, "run", f"process {self.started}", self.silence,
            lambda member, message: membership.receive(member, message),
            lambda member, reason: losses.append((member, reason)),
        )  # fmt: skip
        membership = self.ranks[replica] = Membership(peers, self.minimum, 20.0, self.folder)
        peers.start()
        return membership

    def form(self) -> dict[int, Decision]:
        for replica in range(len(self.addresses)):
            self.start(replica)
        assert not any(self.together(lambda m: m.finds_running_job()).values())
        return self.together(lambda membership: membership.form(1))

    def decide(self, step: int, complete=True, only=None) -> dict[int, Decision]:
        ranks = only if only is not None else list(self.ranks)
        return self.together(
            lambda m: m.decide(step, complete, f"of {m.own[0]}"), dict.fromkeys(ranks)
        )

    def together(self, call, ranks=None) -> dict:
        """Call ``call`` with every membership at the same time; return results and errors."""
        found = {}

        def run(replica: int) -> None:
            try:
                found[replica] = call(self.ranks[replica])
            except RankFailure as error:
                found[replica] = error

        threads = [threading.Thread(target=run, args=(r,)) for r in ranks or list(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "no decision"
        return found

    def lose(self, replica: int) -> None:
        self.ranks.pop(replica).peers.abandon()

    def close(self) -> None:
        for membership in self.ranks.values():
            membership.peers.close()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def job(request, tmp_path):
    made = Job(tmp_path / "elastic", **getattr(request, "param", {"count": 3}))
    yield made
    made.close()


def replicas(decision: Decision) -> list[int]:
    return [index for index, _ in decision.members]


def test_complete_steps_are_committed_with_the_payloads_of_all(job):
    formed = job.form()
    assert {each.group for each in formed.values()} != {""}
    assert all(not each.committed and replicas(each) == [0, 1, 2] for each in formed.values())
    for step in (1, 2):
        decided = job.decide(step)
        assert len(decided) == 3
        for each in decided.values():
            assert each.committed and not each.group
            assert each.payloads == {0: "of 0", 1: "of 1", 2: "of 2"}


def test_a_faulty_replica_is_excluded_by_all_and_the_step_computed_again(job):
    job.form()
    for membership in job.ranks.values():
        membership.find_faulty = lambda payloads: [r for r in payloads if r == 1]
    decided = job.decide(1)
    for each in decided.values():
        assert not each.committed and each.faulty == (1,) and replicas(each) == [0, 2]
        assert Decision.from_json(each.to_json()) == each and set(each.payloads) == {0, 1, 2}
    job.lose(1)
    for each in job.decide(1).values():
        assert each.committed and set(each.payloads) == {0, 2}


def only_one_is_faulty(payloads) -> list[int]:
    return [replica for replica in payloads if replica == 1]


def hold_votes(membership, sender: int, step: int) -> None:
    """Keep the vote of ``sender`` on ``step`` with all members from ``membership``."""
    key, receive = membership._key(step, membership.view), membership.receive
    membership.receive = lambda member, message: (
        None if message.get("vote") == key and member[0] == sender else receive(member, message)
    )


def test_replicas_meet_again_if_one_missed_the_exclusion_of_a_faulty_one(job):
    """A vote comes after the faulty replica has ended: there are then two decisions."""
    job.form()
    for membership in job.ranks.values():
        membership.find_faulty = only_one_is_faulty
    hold_votes(job.ranks[0], sender=2, step=1)
    behind = {}
    thread = threading.Thread(target=lambda: behind.update(job.decide(1, only=[0])))
    thread.start()
    excluded = job.decide(1, only=[1, 2])[2]
    assert replicas(excluded) == [0, 2] and not job.ranks[2].missing()
    job.lose(1)
    wait_for(job.ranks[2].missing)
    assert "replica 0 votes again on step 1" in job.ranks[2].missing()
    again = job.decide(1, complete=False, only=[2])[2]
    thread.join(10)
    assert again.group == behind[0].group != excluded.group
    assert not again.committed and replicas(again) == replicas(behind[0]) == [0, 2]
    assert not job.ranks[0].missing() and not job.ranks[2].missing()


def test_a_faulty_replica_that_ends_before_the_decision_is_found(job):
    job.form()
    for membership in job.ranks.values():
        membership.find_faulty = only_one_is_faulty
    hold_votes(job.ranks[0], sender=2, step=1)
    hold_votes(job.ranks[2], sender=0, step=1)
    decided = {}
    threads = [
        threading.Thread(target=lambda r=replica: decided.update(job.decide(1, only=[r])))
        for replica in (0, 2)
    ]
    for thread in threads:
        thread.start()
    job.decide(1, only=[1])
    job.lose(1)
    for thread in threads:
        thread.join(10)
    for each in decided.values():
        assert not each.committed and each.faulty == (1,) and replicas(each) == [0, 2]
        assert set(each.payloads) == {0, 1, 2}


def test_step_of_a_lost_replica_is_computed_again_by_the_others(job):
    job.form()
    job.decide(1)
    job.lose(0)  # also the first one may be lost
    again = job.decide(2, complete=False)
    assert all(not each.committed and replicas(each) == [1, 2] for each in again.values())
    assert len({each.group for each in again.values()}) == 1
    decided = job.decide(2)
    assert all(each.committed and not each.group for each in decided.values())


def test_complete_step_is_committed_though_a_replica_is_lost_after_its_gradients(job):
    job.form()
    job.lose(2)
    decided = job.decide(1)
    assert all(each.committed and replicas(each) == [0, 1] for each in decided.values())
    assert all(each.group for each in decided.values())


def test_failed_sum_without_a_loss_is_repeated_in_a_new_group(job):
    first = job.form()
    again = job.together(lambda m: m.decide(1, m.own[0] != 1, None))
    groups = {each.group for each in (*first.values(), *again.values())}
    assert len(groups) == 2 and all(replicas(each) == [0, 1, 2] for each in again.values())
    third = job.together(lambda m: m.decide(1, m.own[0] != 1, None))
    assert {each.group for each in third.values()}.isdisjoint(groups)


def test_replica_whose_peers_have_committed_follows_them(job):
    job.form()
    job.decide(1)
    fast = [0, 2]
    hold_votes(job.ranks[1], sender=2, step=2)
    results = {}
    thread = threading.Thread(target=lambda: results.update(job.decide(2, only=[1])))
    thread.start()
    committed = job.decide(2, only=fast)
    assert all(each.committed for each in committed.values())
    thread.join(0.5)
    assert not results
    job.lose(2)
    voted = threading.Thread(target=lambda: job.decide(3, complete=False, only=[0]))
    voted.start()
    thread.join(10)
    assert results[1].committed and results[1].group == LOST_GROUP
    assert results[1].payloads == committed[0].payloads
    repaired = job.decide(3, complete=False, only=[1])
    voted.join(10)
    assert replicas(repaired[1]) == [0, 1]


def test_restarted_replica_joins_after_a_step_and_is_no_longer_the_first(job):
    job.form()
    job.lose(0)
    job.decide(1, complete=False)
    joiner = job.start(0)
    assert joiner.finds_running_job()
    results = {}
    thread = threading.Thread(target=lambda: results.update(joined=joiner.join()))
    thread.start()
    others = {1: job.ranks[1], 2: job.ranks[2]}
    wait_for(lambda: all(m._joining(m.view) for m in others.values()))
    decided = job.decide(1, only=others)
    thread.join(10)
    for each in (*decided.values(), results["joined"]):
        assert replicas(each) == [1, 2, 0] and [index for index, _ in each.joined] == [0]
    assert len({each.group for each in (*decided.values(), results["joined"])}) == 1
    assert results["joined"].step == 1
    assert all(each.committed for each in job.decide(2).values())


@pytest.mark.parametrize("job", [{"count": 3, "silence": 0.8}], indirect=True)
def test_suspended_replica_is_told_that_the_others_have_gone_on(job):
    job.form()
    silent = job.ranks.pop(2)
    silent.peers._beat = 1e9  # its heartbeats stop, and its connections stay open
    time.sleep(1.5)
    decided = job.decide(1, complete=False)
    assert all(replicas(each) == [0, 1] for each in decided.values())
    silent.peers.send(0, {"beat": silent.peers.status})
    with pytest.raises(RankFailure, match=r"goes on without it.*can be started again"):
        silent.decide(1, True, None)
    silent.peers.abandon()


@pytest.mark.parametrize("job", [{"count": 3, "silence": 0.8}], indirect=True)
def test_minority_that_is_cut_off_ends(job):
    job.form()
    for index in (0, 1):
        job.ranks[index].peers._beat = 1e9
    time.sleep(1.5)
    with pytest.raises(RankFailure, match=r"cannot reach replicas 0, 1 of 3.*started again"):
        job.ranks[2].decide(1, False, None)


@pytest.mark.parametrize("job", [{"count": 2, "silence": 0.8}], indirect=True)
def test_one_of_two_halves_goes_on(job):
    job.form()
    for membership in job.ranks.values():
        membership.peers._beat = 1e9
    time.sleep(1.5)
    found = job.decide(1, complete=False)
    (winner,) = [each for each in found.values() if isinstance(each, Decision)]
    (loser,) = [each for each in found.values() if isinstance(each, RankFailure)]
    assert len(winner.members) == 1 and "may be training without it" in str(loser)


@pytest.mark.parametrize("job", [{"count": 3, "minimum": 2}], indirect=True)
def test_job_ends_below_its_fewest_replicas(job):
    job.form()
    job.lose(0)
    job.decide(1, complete=False)
    job.lose(1)
    wait_for(lambda: job.ranks[2].peers.lost(job.ranks[2].view[0])[0])
    with pytest.raises(RankFailure, match=r"1 replicas are left, and elastic.min_replicas = 2"):
        job.ranks[2].decide(1, False, None)


def test_decision_survives_json():
    decision = Decision(True, ((1, "a"), (0, "b")), "g", ((0, "b"),), {1: [1.5], 0: None}, 7)
    assert Decision.from_json(decision.to_json()) == decision


def wait_for(reached) -> None:
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)
