"""An unfinished `nl.accumulate` refuses the optimizer step and leaves no gradients."""

import pytest

import nearlinear as nl
from nearlinear.distributed.collectives import count_collectives
from tests.support import tiny


def sharded(degree):
    nl.init({"hybrid_shard_degree": degree})
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2(2)
    nl.shard(model)
    return model, tiny.optimizer_for(model, "sgd")


def batches(count):
    return [tiny.batch(tiny.rows(i, 2)) for i in range(count)]


def refusal(optimizer):
    """Return the first part of the error of an optimizer step that must fail."""
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value).split(":")[0]


def test_error_counts_finished_micro_batches():
    def work(rank):
        model, optimizer = sharded(2)
        said = []
        for batch in nl.accumulate(model, batches(3)):
            said.append(refusal(optimizer))
            model(**batch).loss.backward()
        optimizer.step()
        return said

    text = "optimizer.step() after {} of 3 micro-batches"
    for said in nl.spmd.run(work, 4):
        assert said == [text.format(0), text.format(1), text.format(2)]


@pytest.mark.parametrize(("whole", "backward", "count"), [(1, True, 2), (1, False, 1), (0, 1, 1)])
def test_error_after_leaving_the_loop_counts_micro_batches(whole, backward, count):
    """Leave the loop after ``whole`` micro-batches, before or after the next backward pass."""

    def work(rank):
        model, optimizer = sharded(2)
        for position, batch in enumerate(nl.accumulate(model, batches(3))):
            if position == whole and not backward:
                break
            model(**batch).loss.backward()
            if position == whole:
                break
        return refusal(optimizer)

    expected = f"optimizer.step() after {count} of 3 micro-batches"
    assert nl.spmd.run(work, 4) == [expected] * 4


@pytest.mark.parametrize("two_hop", [True, False])
@pytest.mark.parametrize(("ranks", "degree"), [(2, 2), (4, 2)])
def test_leaving_the_loop_drops_the_gradients(two_hop, ranks, degree):
    def work(rank):
        model, _ = sharded(degree)
        for batch in nl.accumulate(model, batches(2), two_hop=two_hop):
            model(**batch).loss.backward()
            there = any(p.grad is not None for p in model.parameters())
            break
        return there, [name for name, p in model.named_parameters() if p.grad is not None]

    for there, left in nl.spmd.run(work, ranks):
        assert not there  # partial gradients are hidden
        assert left == []


def test_backward_after_leaving_the_loop_synchronizes_replicas():
    def work(rank):
        model, _ = sharded(2)
        asked = []
        spy(model, "set_is_last_backward", asked)
        for batch in nl.accumulate(model, batches(3)):
            model(**batch).loss.backward()
            break
        with count_collectives() as counts:
            model(**tiny.batch(tiny.rows(5, 2))).loss.backward()
        return counts.calls["all_reduce"], asked

    for all_reduces, asked in nl.spmd.run(work, 4):
        assert all_reduces == 3  # two blocks and the root
        assert asked == [False, True]


def spy(model, name, values):
    """Record the arguments of a method of ``model`` in ``values``."""
    inner = getattr(model, name)

    def method(value):
        values.append(value)
        return inner(value)

    setattr(model, name, method)


def test_leaving_the_loop_before_the_first_forward_is_no_error():
    """FSDP2 has no state to reset before the first forward pass."""

    def work(rank):
        model, optimizer = sharded(2)
        loop = nl.accumulate(model, batches(2))
        next(loop)
        loop.close()  # same as leaving the loop
        for batch in nl.accumulate(model, batches(2)):
            model(**batch).loss.backward()
        optimizer.step()
        return all(p.grad is not None for p in model.parameters())

    assert nl.spmd.run(work, 2) == [True, True]


def test_steps_that_were_left_or_lack_a_backward_pass_do_not_go_on():
    def work(rank):
        model, _ = sharded(2)
        step = nl.accumulation(model, 2)
        step.leave()
        with pytest.raises(nl.errors.NearlinearError, match="this step has ended"):
            step.begin_micro_batch()
        step = nl.accumulation(model, 2)
        step.begin_micro_batch()
        for proceed in (step.end_micro_batch, step.begin_micro_batch):
            with pytest.raises(nl.errors.NearlinearError, match="followed by 0 backward passes"):
                proceed()

    nl.spmd.run(work, 2)


def test_error_after_the_last_backward_pass_leaves_no_gradients():
    def work(rank):
        model, optimizer = sharded(2)
        with pytest.raises(ValueError), nl.accumulation(model, 1) as step, step.micro_batch():
            model(**batches(1)[0]).loss.backward()
            raise ValueError
        assert "optimizer.step() after 1 of 1" in refusal(optimizer)
        return [name for name, p in model.named_parameters() if p.grad is not None]

    assert nl.spmd.run(work, 2) == [[], []]
