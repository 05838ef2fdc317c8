"""The sum over replicas has the same bits on any members."""

import threading

import pytest
import torch
import torch.distributed as dist

from nearlinear.elastic.replica_sum import WHOLE, ReplicaGroup, ReplicaSum, Work, assign_work
from nearlinear.errors import NearlinearError

MICRO_BATCHES = 3


def sum_on(of_members, gradients, targets, backend="gloo") -> list[list[torch.Tensor]]:
    """Return the sums of two units on each member, which are threads of this process.

    Args:
        of_members: The work of each member.
        gradients: Of each replica, micro-batch and unit.
        targets: Of each replica.
    """
    store, results = dist.HashStore(), [None] * len(of_members)

    def computed(work: Work) -> list[torch.Tensor]:
        """Return new tensors, as the ranks of a replica add them up."""
        first, *others = gradients[work.replica]
        if work.micro_batch != WHOLE:
            first, others = gradients[work.replica][work.micro_batch], []
        units = [unit.clone() for unit in first]
        for other in others:
            for unit, more in zip(units, other, strict=True):
                unit += more
        return units

    def member(position: int) -> None:
        failures = []
        each = ReplicaSum(len(gradients), failures.append)
        connect = lambda: ReplicaGroup(backend, store, position, len(of_members))  # noqa: E731
        assert each.install(connect, str, position, of_members), failures
        each.begin_step()
        for work in each.own:
            each.computing = work
            each.targets[work.replica] = targets[work.replica]
            units = computed(work)
            for number, unit in enumerate(units):
                each.add(number, unit)
            each.end_work()
        assert not failures, failures
        results[position] = units

    threads = [threading.Thread(target=member, args=(m,)) for m in range(len(of_members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("targets", [[64.0] * 4, [64.0, 0.0, 17.0, 3.0]])
@pytest.mark.parametrize("sizes", [(1 << 12, 8), (1001, 3)])
def test_bits_do_not_depend_on_who_computes_a_replica(targets, sizes):
    torch.manual_seed(0)
    gradients = [
        [
            [torch.randn(size) * 10**r / MICRO_BATCHES for size in sizes]
            for _ in range(MICRO_BATCHES)
        ]
        for r in range(4)
    ]
    undisturbed = sum_on(assign_work(4, [0, 1, 2, 3], "exact"), gradients, targets)
    for number in range(len(sizes)):
        of_replicas = [sum(each[number].double() for each in gradients[r]) for r in range(4)]
        if len(set(targets)) == 1:
            mean = sum(of_replicas) / 4
        else:
            mean = sum(of_replicas[r] * targets[r] / sum(targets) for r in range(4))
        torch.testing.assert_close(undisturbed[0][number].double(), mean, rtol=1e-5, atol=1e-4)
    for members in ([0, 1, 2], [3, 1], [2]):
        for micro_batches in (0, MICRO_BATCHES):
            work = assign_work(4, members, "exact", micro_batches)
            for own in sum_on(work, gradients, targets):
                for number in range(len(sizes)):
                    assert torch.equal(own[number], undisturbed[0][number])


@pytest.mark.parametrize("used", [([0, 1], [0, 2]), ([0], [0])])
def test_units_that_some_micro_batches_leave_out_are_refused(used):
    """Members add other units of the same size, or one of them does in a part of its work."""
    store, told, same = dist.HashStore(), [""] * 2, used[0] == used[1]
    work = assign_work(3 if same else 2, [0, 1], "exact")

    def member(position: int) -> None:
        each = ReplicaSum(3, lambda reason: None)
        each.install(lambda: ReplicaGroup("gloo", store, position, 2), str, position, work)
        each.begin_step()
        for number, own in enumerate(each.own):
            each.computing = own
            each.targets[own.replica] = 4.0
            for unit in used[position] + ([7] if same and number == 0 and position == 0 else []):
                each.add(unit, torch.ones(4))
            each.end_work()
        try:
            each.gather_rows(torch.zeros(3, 1, 2, dtype=torch.float64))
        except NearlinearError as error:
            told[position] = str(error)

    threads = [threading.Thread(target=member, args=(m,)) for m in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all("have not used all blocks" in each for each in told)


def test_rescaled_mean_leaves_lost_replicas_out():
    gradients = [[[torch.full((4,), float(replica))]] for replica in range(4)]
    (own,) = sum_on(assign_work(4, [3], "rescale"), gradients, [1.0] * 4)
    assert own[0].tolist() == [3.0] * 4
    first, _ = sum_on(assign_work(4, [1, 3], "rescale"), gradients, [1.0, 3.0, 1.0, 1.0])
    assert first[0].tolist() == [1.5] * 4


def test_lost_replicas_are_divided_among_the_members():
    def of(*replicas):
        return [Work(replica) for replica in replicas]

    assert assign_work(4, [0, 1, 2, 3], "exact", 3) == [of(0), of(1), of(2), of(3)]
    assert assign_work(4, [3, 1], "exact") == [of(0, 3), of(1, 2)]
    assert assign_work(4, [2], "exact") == [of(0, 1, 2, 3)]
    assert assign_work(4, [3, 1], "rescale", 3) == [of(3), of(1)]
    assert assign_work(4, [0, 1, 3], "exact", 3) == [
        [Work(0), Work(2, 0)], [Work(1), Work(2, 1)], [Work(2, 2), Work(3)],
    ]  # fmt: skip
    loads = [len(each) for each in assign_work(8, [0, 2, 3, 5, 6, 7], "exact", 4)]
    assert sum(loads) == 6 + 2 * 4 and max(loads) - min(loads) == 1


def test_failure_does_not_raise_and_ends_the_sums_of_the_step():
    failures = []
    each = ReplicaSum(2, failures.append)
    store = dist.HashStore()
    connect = lambda: ReplicaGroup("gloo", store, 0, 2)  # noqa: E731
    waiting = threading.Timer(0.5, lambda: each.fail("replica 1 is lost"))
    waiting.start()
    assert not each.install(connect, str, 0, [[Work(0)], [Work(1)]])
    gradient = torch.ones(4)
    each.computing = Work(0)
    each.add("unit", gradient)
    each.end_work()
    assert failures == ["replica 1 is lost"] and gradient.tolist() == [1.0] * 4
