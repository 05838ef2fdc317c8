"""Two-hop synchronisation: its communication, its gradients, the mistakes it prevents."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear.distributed.collectives import count_collectives
from nearlinear.fsdp.accumulate import AccumulationStep
from nearlinear.fsdp.model_state import local_tensor
from nearlinear.fsdp.targets import SHIFTED
from tests.support import tiny
from tests.support.processes import in_turn
from tests.support.releases import needs_hooks


def sharded(degree, kind="gpt2", layers=3, config=None, **options):
    nl.init({"hybrid_shard_degree": degree} | (config or {}))
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.MODELS[kind](layers)
    return nl.shard(model, **options)


def counted(rank, kind, two_hop, reshard, reduction="auto"):
    """Collectives of 4 micro-batches on 4 units, as 2 replicas x 2 shards."""
    config = {"gradient_reduction": reduction}
    model = sharded(2, kind, config=config, reshard_after_forward=reshard)
    calls, volume = Counter(), Counter()
    micro_batches = [tiny.batch(tiny.rows(i, 2)) for i in range(4)]
    for micro_batch in nl.accumulate(model, micro_batches, two_hop=two_hop):
        with count_collectives() as counts:
            model(**micro_batch).loss.backward()
        calls += counts.calls
        volume += counts.bytes
    return dict(calls), dict(volume)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("two_hop", "reshard", "reduction", "expected"),
    [
        (False, True, "auto", {"all_gather": 32, "reduce_scatter": 16, "all_reduce": 16}),
        (True, True, "auto", {"all_gather": 32, "reduce_scatter": 16, "all_reduce": 4}),
        # units that may stay gathered do, here all: see test_prefetch.py
        (True, None, "micro_batch", {"all_gather": 4, "reduce_scatter": 16, "all_reduce": 4}),
        (False, None, "auto", {"all_gather": 4, "reduce_scatter": 16, "all_reduce": 16}),
        (True, None, "auto", {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 4}),
    ],
)
def test_replicas_synchronize_once_per_step(kind, two_hop, reshard, reduction, expected):
    for calls, _ in nl.spmd.run(counted, 4, args=(kind, two_hop, reshard, reduction)):
        assert calls == expected


@pytest.mark.parametrize(
    ("two_hop", "reduction", "all_reduces"),
    [(True, "auto", 4), (True, "micro_batch", 4), (False, "auto", 16)],
)
def test_whole_replicas_only_all_reduce(two_hop, reduction, all_reduces):
    def calls(rank):
        model = sharded(1, config={"gradient_reduction": reduction})
        with count_collectives() as counts:
            batches = [tiny.batch(tiny.rows(i, 2)) for i in range(4)]
            for micro_batch in nl.accumulate(model, batches, two_hop=two_hop):
                model(**micro_batch).loss.backward()
        return dict(counts.calls)

    agreement = 2  # numbers of targets: expected, then measured
    for found in nl.spmd.run(calls, 2):
        assert found == {"all_reduce": all_reduces + agreement}


def test_two_hop_sends_a_quarter_of_the_bytes_between_replicas():
    one = nl.spmd.run(counted, 4, args=("gpt2", False, None, "micro_batch"))[0][1]
    two = nl.spmd.run(counted, 4, args=("gpt2", True, None, "micro_batch"))[0][1]
    assert one["all_reduce"] == 4 * two["all_reduce"]
    assert one["reduce_scatter"] == two["reduce_scatter"]


@needs_hooks
@pytest.mark.slow
def test_collective_counts_of_processes_equal_those_of_threads():
    runs = [("gpt2", two_hop, True) for two_hop in (True, False)]
    for run, processes in zip(runs, in_turn(counted, 4, runs), strict=True):
        threads = nl.spmd.run(counted, 4, args=run)
        for of_threads, of_processes in zip(threads[0], processes[0], strict=True):
            # on gloo ranks exchange the parts, and add them up themselves: see parallel/scatter.py
            of_processes["reduce_scatter"] = of_processes.pop("all_to_all")
            assert of_processes == of_threads


def mean_gradient(micro_batches_of_ranks):
    """The gradient of the mean over every target of every batch, on one process."""
    torch.manual_seed(0)
    model = tiny.gpt2(2)
    total, loss = 0, 0.0
    for batches in micro_batches_of_ranks:
        for batch in batches:
            targets = SHIFTED.count(batch)
            loss = loss + model(**batch).loss * targets
            total += targets
    (loss / total).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_uneven_micro_batches_weight_targets_equally(data):
    ranks, accumulation = data.draw(st.sampled_from([(2, 1), (2, 3), (4, 2)]))
    degree = data.draw(st.sampled_from([d for d in (1, 2, 4) if d <= ranks]))
    shapes = [
        [
            (data.draw(st.integers(1, 4)), data.draw(st.integers(0, tiny.SEQUENCE - 4)))
            for _ in range(accumulation)
        ]
        for _ in range(ranks)
    ]

    def batches(rank):
        result = []
        for index, (count, masked) in enumerate(shapes[rank]):
            ids = tiny.rows(10 * rank + index, count)
            labels = ids.clone()
            labels[:, :masked] = -100
            result.append({"input_ids": ids, "labels": labels})
        return result

    def gradients(rank):
        model = sharded(degree, layers=2)
        for batch in nl.accumulate(model, batches(rank)):
            model(**batch).loss.backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    expected = mean_gradient([batches(rank) for rank in range(ranks)])
    for found in nl.spmd.run(gradients, ranks):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-4)


def test_loss_outside_the_model_is_weighted_once():
    shares = [tiny.rows(0, 3), tiny.rows(1, 1)]

    def cross_entropy(logits, ids):
        flat = logits[:, :-1].reshape(-1, tiny.VOCABULARY).float()
        return torch.nn.functional.cross_entropy(flat, ids[:, 1:].reshape(-1))

    def gradients(rank):
        model = sharded(1, layers=2)
        for batch in nl.accumulate(model, [tiny.batch(shares[rank])]):
            logits = model(input_ids=batch["input_ids"]).logits
            cross_entropy(logits, batch["input_ids"]).backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    expected = mean_gradient([[tiny.batch(ids)] for ids in shares])
    found = nl.spmd.run(gradients, 2)[0]
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-4)


def test_micro_batches_may_use_different_parameters():
    class Choice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
            self.spare = torch.nn.Linear(6, 6)

        def forward(self, x, spare):
            for layer in self.layers:
                x = layer(x)
            return (self.spare(x) if spare else x).square().mean()

    half = torch.full((2, 6), 0.5)
    inputs = [{"x": torch.ones(2, 6), "spare": True}, {"x": half, "spare": False}]

    def gradients(rank):
        nl.init({"hybrid_shard_degree": 2})
        with nl.spmd.one_at_a_time(seed=0):
            model = Choice()
        nl.shard(model)
        for batch in nl.accumulate(model, inputs):
            model(**batch).backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    torch.manual_seed(0)
    model = Choice()
    sum(model(**batch) / 2 for batch in inputs).backward()
    for found in nl.spmd.run(gradients, 4):
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


def step_after(body):
    """Run ``body(model, optimizer)`` on 4 ranks as 2 x 2."""

    def on_rank(rank):
        model = sharded(2, layers=2)
        return body(model, tiny.optimizer_for(model, "sgd"))

    return nl.spmd.run(on_rank, 4)


def two_batches():
    return [tiny.batch(tiny.rows(i, 2)) for i in range(2)]


def test_optimizer_step_inside_accumulate_is_an_error():
    def body(model, optimizer):
        for batch in nl.accumulate(model, two_batches()):
            model(**batch).loss.backward()
            with pytest.raises(RuntimeError, match="of 2 micro-batches"):
                optimizer.step()
            with pytest.raises(RuntimeError, match="of 2 micro-batches"):
                nl.clip_grad_norm_(model, 1.0)

    step_after(body)


def test_leaving_accumulate_early_drops_the_step():
    def body(model, optimizer):
        for batch in nl.accumulate(model, two_batches()):
            model(**batch).loss.backward()
            break
        with pytest.raises(RuntimeError, match="run to its end"):
            optimizer.step()
        for batch in nl.accumulate(model, two_batches()):  # a whole step afterwards is right
            model(**batch).loss.backward()
        optimizer.step()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    torch.manual_seed(0)
    model = tiny.gpt2(2)
    sum(model(**batch).loss / 2 for batch in two_batches()).backward()
    for found in step_after(body):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, atol=2e-6, rtol=1e-4)


def test_missing_backward_is_an_error():
    def body(model, optimizer):
        with pytest.raises(nl.errors.NearlinearError, match="0 backward passes"):
            for batch in nl.accumulate(model, two_batches()):
                model(**batch)

    step_after(body)


def test_two_forwards_per_micro_batch_are_an_error():
    def body(model, optimizer):
        with pytest.raises(nl.errors.NearlinearError, match="2 backward passes"):
            for batch in nl.accumulate(model, two_batches()):
                model(**batch).loss.backward()
                model(**batch).loss.backward()

    step_after(body)


def test_different_numbers_of_micro_batches_are_an_error():
    def on_rank(rank):
        model = sharded(2, layers=2)
        with pytest.raises(nl.errors.NearlinearError, match="other ranks have other numbers"):
            for _ in nl.accumulate(model, two_batches()[: 1 + rank % 2]):
                pass

    nl.spmd.run(on_rank, 4)


@pytest.mark.parametrize(("masked", "reason"), [(0, "no micro-batches"), (1, "no target")])
def test_step_without_targets_is_an_error(masked, reason):
    ids = tiny.rows(0, 2)
    batches = [{"input_ids": ids, "labels": torch.full_like(ids, -100)}] * masked

    def on_rank(rank):
        model = sharded(1, layers=2)
        with pytest.raises(nl.errors.DataError, match=reason):
            for _ in nl.accumulate(model, batches):
                pass

    nl.spmd.run(on_rank, 2)


def test_accumulate_refuses_an_unsharded_model():
    with pytest.raises(nl.errors.NearlinearError, match=r"nl\.shard"):
        next(nl.accumulate(torch.nn.Linear(2, 2), [1]))


def gradients_of_a_whole_step(model):
    for batch in nl.accumulate(model, two_batches()):
        model(**batch).loss.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def assert_a_whole_step_is_right(body):
    """After ``body(model)`` the gradients of the next step are those of a single process."""
    torch.manual_seed(0)
    model = tiny.gpt2(2)
    sum(model(**batch).loss / 2 for batch in two_batches()).backward()

    def on_rank(model, optimizer):
        body(model)
        return gradients_of_a_whole_step(model)

    for found in step_after(on_rank):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, atol=2e-6, rtol=1e-4)


def test_abandoned_loop_does_not_weight_the_next_step():
    kept = []

    def body(model):
        loop = nl.accumulate(model, two_batches())
        model(**next(loop)).loss.backward()
        kept.append(loop)  # still alive during the next step, and closed after it

    assert_a_whole_step_is_right(body)


def test_failed_backward_leaves_no_gradients():
    def fail(module, args, output):
        return (tiny.Fails.apply(output[0]), *output[1:]) if isinstance(output, tuple) else (
            tiny.Fails.apply(output)
        )  # fmt: skip

    def body(model):
        hook = model.transformer.h[1].register_forward_hook(fail)
        with pytest.raises(ValueError, match="out of luck"):
            for batch in nl.accumulate(model, two_batches()):
                model(**batch).loss.backward()
        hook.remove()

    assert_a_whole_step_is_right(body)


def test_second_backward_through_one_forward_is_an_error():
    def body(model, optimizer):
        with pytest.raises(nl.errors.NearlinearError, match="second backward"):
            for batch in nl.accumulate(model, two_batches()):
                loss = model(**batch).loss
                loss.backward(retain_graph=True)
                loss.backward()

    step_after(body)


def test_micro_batch_without_targets_has_no_weight():
    ids = tiny.rows(0, 2)
    empty = {"input_ids": ids, "labels": torch.full_like(ids, -100)}

    def gradients(rank):
        model = sharded(2, layers=2)
        batches = two_batches() if rank == 0 else [empty, empty]
        for batch in nl.accumulate(model, batches):
            model(**batch).loss.backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    expected = mean_gradient([two_batches()])
    for found in nl.spmd.run(gradients, 2):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-4)


def test_optimizer_built_before_sharding_is_refused():
    def on_rank(rank):
        nl.init({"hybrid_shard_degree": 2})
        with nl.spmd.one_at_a_time(seed=0):
            model = tiny.gpt2(2)
        optimizer = tiny.optimizer_for(model, "sgd")
        nl.shard(model)
        for batch in nl.accumulate(model, two_batches()):
            model(**batch).loss.backward()
        with pytest.raises(RuntimeError, match=r"built before nl\.shard"):
            optimizer.step()

    nl.spmd.run(on_rank, 2)


def uneven_batches(rank):
    """Micro-batches with other numbers of targets: the first has none, the third none on rank 1."""
    result = []
    for index, (size, hidden) in enumerate([(2, 99), (3 + rank, 0), (1, 99 * (rank == 1)), (2, 5)]):
        ids = tiny.rows(10 * rank + index, size)
        labels = ids.clone()
        labels[:, :hidden] = -100
        result.append({"input_ids": ids, "labels": labels})
    return result


def with_batches(model, batches):
    with nl.accumulation(model, len(batches)) as step:
        for batch in batches:
            with step.micro_batch(batch):
                model(**batch).loss.backward()


def of_unknown_number(model, batches):
    step = nl.accumulation(model)
    for position, batch in enumerate(batches):
        step.begin_micro_batch(last=position == len(batches) - 1)
        model(**batch).loss.backward()
        step.end_micro_batch()


def with_targets(model, batches):
    with nl.accumulation(model, len(batches)) as step:
        for batch in batches:
            with step.micro_batch(targets=SHIFTED.count(batch)):
                model(**batch).loss.backward()


def with_loss_outside(model, batches):
    with nl.accumulation(model, len(batches)) as step:
        for batch in batches:
            with step.micro_batch():
                logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
                labels = batch["labels"][:, 1:].reshape(-1)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels)
                step.backward(loss)


@pytest.mark.parametrize("body", [with_batches, of_unknown_number, with_targets, with_loss_outside])
def test_step_of_micro_batches_as_they_come_equals_one_process(body):
    def batches(rank):
        return uneven_batches(rank)[:2] if body is with_loss_outside else uneven_batches(rank)

    def gradients(rank):
        model = sharded(2, layers=2)
        body(model, batches(rank))
        with count_collectives() as counts:
            body(model, batches(rank))  # adds to the gradients of the step before
        found = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        return found, counts.calls

    expected = mean_gradient([[b for b in batches(rank) if SHIFTED.count(b)] for rank in range(4)])
    for found, calls in nl.spmd.run(gradients, 4):
        assert calls["all_reduce"] <= 3 + 3  # units, and the numbers of targets
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], 2 * gradient, atol=4e-6, rtol=1e-4)


def test_gradients_zeroed_between_forward_and_backward_stay_zero():
    def body(model):
        optimizer = tiny.optimizer_for(model, "sgd")  # knows the shards of gathered parameters
        for _ in range(2):
            with nl.accumulation(model, 2) as step:
                for position, batch in enumerate(two_batches()):
                    with step.micro_batch(batch):
                        loss = model(**batch).loss
                        if position == 0:
                            optimizer.zero_grad()
                        loss.backward()
            found = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        model.zero_grad()
        for name, gradient in gradients_of_a_whole_step(model).items():
            torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-4)
        model.zero_grad()

    assert_a_whole_step_is_right(body)


def test_step_of_micro_batches_is_scaled_in_float16():
    def on_rank(rank):
        model = sharded(2, layers=2, config={"fp16": True, "init_scale": 2.0**12})
        with_batches(model, uneven_batches(rank))
        assert not nl.loss_scaler(model).overflow
        return {n: p.grad.full_tensor() for n, p in model.named_parameters()}

    batches = [[b for b in uneven_batches(rank) if SHIFTED.count(b)] for rank in range(2)]
    expected = mean_gradient(batches)
    for found in nl.spmd.run(on_rank, 2):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=2e-3, rtol=2e-2)


def test_leaving_a_step_of_micro_batches_drops_it():
    def body(model):
        optimizer = tiny.optimizer_for(model, "sgd")
        with nl.accumulation(model, 2) as step:
            with step.micro_batch():
                model(**two_batches()[0]).loss.backward()
            with pytest.raises(RuntimeError, match="after 1 of 2 micro-batches"):
                optimizer.step()
        with pytest.raises(RuntimeError, match="after 1 of 2 micro-batches"):
            optimizer.step()
        with pytest.raises(nl.errors.NearlinearError, match="step has ended"):
            step.begin_micro_batch()
        with nl.accumulation(model) as step, step.micro_batch():
            model(**two_batches()[0]).loss.backward()  # not declared the last one
        with (
            pytest.raises(nl.errors.NearlinearError, match="1 was followed by 0"),
            nl.accumulation(model) as step,
            step.micro_batch(last=True),
        ):
            pass
        assert all(p.grad is None for p in model.parameters())

    assert_a_whole_step_is_right(body)


def test_steps_of_different_lengths_are_an_error():
    def on_rank(rank):
        model = sharded(1, layers=2)
        with (
            pytest.raises(nl.errors.NearlinearError, match="other ranks have other numbers"),
            nl.accumulation(model, 1 + rank) as step,
        ):
            step.begin_micro_batch(two_batches()[0])

    nl.spmd.run(on_rank, 2)
    with pytest.raises(nl.errors.NearlinearError, match="at least 1"):
        nl.accumulation(torch.nn.Linear(2, 2), 0)


def test_accumulation_refuses_batches_of_the_first_pipeline_stage():
    """`nl.accumulate` sends the whole batch at once; single micro-batches are not sent."""
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, "pipeline_batch": "first_stage"}

    def on_rank(rank):
        nl.init(config)
        with nl.spmd.one_at_a_time(seed=0):
            model = tiny.gpt2(2)
        model = nl.shard(nl.pipeline(model))
        with pytest.raises(nl.errors.ConfigError, match="pipeline_batch = 'first_stage'"):
            nl.accumulation(model, 2)

    nl.spmd.run(on_rank, 2)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_single_micro_batches_of_a_step_add_up_to_its_bits(kind, ranks):
    """Elastic replicas let different members compute the micro-batches of a lost one."""

    def gradients(model, batches, only=None):
        for batch in AccumulationStep(model, None, True).run(batches, None, only):
            model(**batch).loss.backward()
        found = {n: local_tensor(p.grad).clone() for n, p in model.named_parameters()}
        model.zero_grad()
        return found

    def compare(rank):
        model = sharded(ranks, kind, layers=2, config={"gradient_reduction": "micro_batch"})
        batches = uneven_batches(rank)
        whole = gradients(model, batches)
        single = [gradients(model, batches, only) for only in range(len(batches))]
        return [name for name, gradient in whole.items()
                if not torch.equal(gradient, sum(each[name] for each in single))]  # fmt: skip

    assert nl.spmd.run(compare, ranks) == [[]] * ranks
