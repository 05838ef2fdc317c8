"""The sum over replicas has the same bits on any members."""

import threading

import pytest
import torch
import torch.distributed as dist

from nearlinear.elastic.job import assign_replicas
from nearlinear.elastic.replica_sum import ReplicaGroup, ReplicaSum


def sum_on(hosts, gradients, targets, backend="gloo") -> list[list[torch.Tensor]]:
    """Return the sums of two units on each member, which are threads of this process."""
    store, results = dist.HashStore(), [None] * len(hosts)

    def member(position: int) -> None:
        failures = []
        each = ReplicaSum(len(gradients), failures.append)
        connect = lambda: ReplicaGroup(backend, store, position, len(hosts))  # noqa: E731
        assert each.install(connect, str, position, hosts), failures
        each.begin_step()
        own = [[unit.clone() for unit in gradients[replica]] for replica in each.own]
        for replica, units in zip(each.own, own, strict=True):
            each.computing = replica
            each.targets[replica] = targets[replica]
            for number, unit in enumerate(units):
                each.add(number, unit)
            each.end_replica()
        assert not failures, failures
        results[position] = own[-1]

    threads = [threading.Thread(target=member, args=(m,)) for m in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("targets", [[64.0] * 4, [64.0, 0.0, 17.0, 3.0]])
@pytest.mark.parametrize("sizes", [(1 << 12, 8), (1001, 3)])
def test_bits_do_not_depend_on_who_computes_a_replica(targets, sizes):
    torch.manual_seed(0)
    gradients = [[torch.randn(size) * 10**r for size in sizes] for r in range(4)]
    undisturbed = sum_on(assign_replicas(4, [0, 1, 2, 3], "exact"), gradients, targets)
    for number in range(len(sizes)):
        if len(set(targets)) == 1:
            mean = sum(gradients[r][number].double() for r in range(4)) / 4
        else:
            total = sum(targets)
            mean = sum(gradients[r][number].double() * targets[r] / total for r in range(4))
        torch.testing.assert_close(undisturbed[0][number].double(), mean, rtol=1e-5, atol=1e-4)
    for members in ([0, 1, 2], [3, 1], [2]):
        for own in sum_on(assign_replicas(4, members, "exact"), gradients, targets):
            for number in range(len(sizes)):
                assert torch.equal(own[number], undisturbed[0][number])


def test_rescaled_mean_leaves_lost_replicas_out():
    gradients = [[torch.full((4,), float(replica))] for replica in range(4)]
    (own,) = sum_on(assign_replicas(4, [3], "rescale"), gradients, [1.0] * 4)
    assert own[0].tolist() == [3.0] * 4
    first, _ = sum_on(assign_replicas(4, [1, 3], "rescale"), gradients, [1.0, 3.0, 1.0, 1.0])
    assert first[0].tolist() == [1.5] * 4


def test_lost_replicas_are_divided_among_the_members():
    assert assign_replicas(4, [0, 1, 2, 3], "exact") == [[0], [1], [2], [3]]
    assert assign_replicas(4, [3, 1], "exact") == [[0, 3], [1, 2]]
    assert assign_replicas(4, [2], "exact") == [[0, 1, 2, 3]]
    assert assign_replicas(4, [3, 1], "rescale") == [[3], [1]]


def test_failure_does_not_raise_and_ends_the_sums_of_the_step():
    failures = []
    each = ReplicaSum(2, failures.append)
    store = dist.HashStore()
    connect = lambda: ReplicaGroup("gloo", store, 0, 2)  # noqa: E731
    waiting = threading.Timer(0.5, lambda: each.fail("replica 1 is lost"))
    waiting.start()
    assert not each.install(connect, str, 0, [[0], [1]])
    gradient = torch.ones(4)
    each.computing = 0
    each.add("unit", gradient)
    each.end_replica()
    assert failures == ["replica 1 is lost"] and gradient.tolist() == [1.0] * 4
