"""`compat.smp.step` runs a function on every micro-batch, with and without a pipeline."""

import re

import pytest
import torch

import nearlinear as nl
from nearlinear.compat import smp
from nearlinear.compat.smp import StepOutput, collect_outputs
from nearlinear.fsdp.targets import SHIFTED
from tests.support import families, pipelines

WHOLE = (2, {"microbatches": 4, "hybrid_shard_degree": 2})
PIPED = (2, {"microbatches": 4, "pipeline_parallel_degree": 2})
BACK = (2, {"microbatches": 4, "pipeline_parallel_degree": 2, "pipeline": "zbv_zero_bubble"})
LAYOUTS = [(1, {"microbatches": 4}), WHOLE, PIPED, BACK]


class Rows:
    """Implements SMP's ``smp_slice``."""

    def __init__(self, rows):
        self.rows = rows

    def smp_slice(self, count, i, axis):
        return Rows(self.rows.chunk(count, axis)[i])


def ready(config, family="gpt2"):
    nl.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = families.build(family)
    if config.get("pipeline_parallel_degree", 1) > 1:
        model = nl.pipeline(model)
    return nl.shard(model)


def trained(rank, config):
    model = ready(config)

    @smp.step(non_split_inputs=("halves",), input_split_axes={"columns": 1})
    def train_step(model, ids, columns, halves, **more):
        assert more["extra"].rows.equal(ids) and halves.shape == (2,)
        output = model(ids, labels=columns.t())
        loss = output.loss * halves.sum()
        model.backward(loss)
        return {"loss": loss, "logits": output.logits, "pair": (ids.shape[0], [loss * 2])}

    batch = families.batch(0, 8)
    ids, labels = batch["input_ids"], batch["labels"]
    halves = torch.tensor([0.5, 0.5])
    found = train_step(model, ids, labels.t().contiguous(), halves, extra=Rows(ids))
    gradients = {name: pipelines.whole(p.grad) for name, p in model.named_parameters()}
    assert not found["loss"].outputs[0].requires_grad

    @smp.step
    def test_step(ids, labels):
        return model(ids, labels=labels).loss  # the model may come from outside

    model.eval()
    losses = test_step(ids, labels)
    return found, losses, gradients


@pytest.mark.parametrize(("ranks", "config"), LAYOUTS)
def test_smp_step_matches_the_unmodified_model(ranks, config):
    torch.manual_seed(0)
    model, batch = families.build("gpt2"), families.batch(0, 8)
    model(**batch).loss.backward()
    parts = [{key: value.chunk(4)[i] for key, value in batch.items()} for i in range(4)]
    with torch.no_grad():
        outputs = [model(**part) for part in parts]
    losses = torch.stack([output.loss for output in outputs])
    for found, evaluated, gradients in nl.spmd.run(trained, ranks, args=(config,)):
        assert torch.allclose(found["loss"].stack(), losses, atol=1e-5)
        assert found["loss"].reduce_mean().item() == pytest.approx(losses.mean().item(), abs=1e-5)
        assert found["loss"].reduce_sum().item() == pytest.approx(losses.sum().item(), abs=1e-5)
        logits = torch.cat([output.logits for output in outputs])
        assert torch.allclose(found["logits"].concat(), logits, atol=1e-5)
        assert found["pair"][0].outputs == [2] * 4 and found["pair"][0].reduce_mean() == 2
        assert torch.allclose(found["pair"][1][0].stack(), 2 * losses, atol=1e-5)
        assert torch.allclose(evaluated.stack(), losses, atol=1e-5)
        for name, value in gradients.items():
            assert (value - model.get_parameter(name).grad).abs().max() < 1e-5, name


def test_micro_batches_have_different_numbers_of_targets():
    counts = [
        SHIFTED.count({key: value.chunk(4)[i] for key, value in families.batch(0, 8).items()})
        for i in range(4)
    ]
    assert len(set(counts)) > 1  # or the gradients above would not show it


@pytest.mark.slow
def test_smp_step_over_processes():
    found = nl.spmd.run(trained, 2, args=(PIPED[1],), processes=True)
    expected = nl.spmd.run(trained, 2, args=(PIPED[1],))
    for (there, _, there_too), (here, _, here_too) in zip(found, expected, strict=True):
        assert torch.allclose(there["logits"].concat(), here["logits"].concat(), atol=1e-6)
        assert all(torch.allclose(there_too[name], here_too[name], atol=1e-6) for name in here_too)


def no_backward(model, ids):
    return model(ids, labels=ids).loss


def own_backward(model, ids):
    loss = model(ids, labels=ids).loss
    loss.backward()
    model.backward(loss)


def two_calls(model, ids):
    loss = model(ids, labels=ids).loss + model(ids, labels=ids).loss
    model.backward(loss)


def two_backwards(model, ids):
    loss = model(ids, labels=ids).loss
    model.backward(loss)
    model.backward(loss)


def no_call(model, ids):
    return ids.sum()


def backward_first(model, ids):
    model.backward(ids.sum())


def fails(model, ids):
    model(ids, labels=ids)
    raise ValueError("a mistake of the user's")


MISTAKES = [
    (no_backward, r"no_backward returned without model.backward\(loss\). Write `loss = model"),
    (two_calls, "two_calls called the model twice in one micro-batch"),
    (two_backwards, "called model.backward twice in one micro-batch. Add the losses"),
    (no_call, "no_call did not call a model that nl.shard has sharded. Write"),
    (backward_first, r"called before model\(...\)"),
    (fails, "a mistake of the user's"),
]


def mistaken(rank, config, function, words):
    """Return the error of a wrong function on this rank, and a correct next step."""
    model = ready(config)
    ids = families.batch(0, 8)["input_ids"]
    told = []
    with pytest.raises((nl.errors.NearlinearError, ValueError)) as caught:
        smp.step(function)(model, ids)
    told.append(str(caught.value))
    caught = None

    @smp.step
    def right(model, ids):
        loss = model(ids, labels=ids).loss
        model.backward(loss)
        return loss

    loss = right(model, ids).reduce_mean().item()
    return told[0], loss, {name: pipelines.whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize(("ranks", "config"), [WHOLE, PIPED])
@pytest.mark.parametrize(("function", "words"), MISTAKES, ids=lambda v: getattr(v, "__name__", ""))
def test_wrong_functions_raise_on_all_ranks_with_a_remedy(function, words, ranks, config):
    torch.manual_seed(0)
    model, ids = families.build("gpt2"), families.batch(0, 8)["input_ids"]
    expected = model(ids, labels=ids).loss
    expected.backward()
    found = nl.spmd.run(mistaken, ranks, args=(config, function, words), timeout=60)
    assert any(re.search(words, told) for told, _, _ in found)
    for told, loss, gradients in found:
        assert re.search(
            f"{words}|the last stage of the pipeline failed. See the error of rank 1", told
        )
        assert loss == pytest.approx(expected.item(), abs=1e-5)
        for name, value in gradients.items():
            assert (value - model.get_parameter(name).grad).abs().max() < 1e-5, name


def test_loss_backward_raises_on_a_pipeline():
    found = nl.spmd.run(mistaken, 2, args=(PIPED[1], own_backward, ""), timeout=60)
    assert "own_backward called loss.backward(), but the schedule of a pipeline" in found[1][0]


def test_smp_step_inside_accumulate_raises():
    def work(rank):
        model = ready({"microbatches": 2})
        with pytest.raises(
            nl.errors.NearlinearError, match="call it outside nl.accumulate, and raise mic"
        ):
            for batch in nl.accumulate(model, [families.batch(0, 2)]):
                smp.step(two_backwards)(model, batch["input_ids"])

    nl.spmd.run(work, 1)


def test_autocast_raises_on_a_pipeline():
    def work(rank, config, autocast):
        model = ready(config)

        @smp.step
        def train_step(ids):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(ids, labels=ids).loss
            model.backward(loss)
            return loss

        return train_step(families.batch(0, 8)["input_ids"]).reduce_mean().item()

    plain, cast = (nl.spmd.run(work, 2, args=(WHOLE[1], on))[0] for on in (False, True))
    assert plain != cast and plain == pytest.approx(cast, rel=0.01)
    nl.spmd.run(work, 2, args=(PIPED[1], False))
    with pytest.raises(nl.spmd.RankError, match="autocast around model"):
        nl.spmd.run(work, 2, args=(PIPED[1], True))


def test_unsupported_outputs_raise_on_all_ranks():
    def work(rank):
        model = ready(PIPED[1])

        @smp.step
        def train_step(ids):
            loss = model(ids, labels=ids).loss
            model.backward(loss)
            return {"loss": loss, "unsupported": object()}

        with pytest.raises(
            nl.errors.NearlinearError,
            match="the result is or contains an object of type object, which cannot be sent",
        ):
            train_step(families.batch(0, 8)["input_ids"])

    nl.spmd.run(work, 2)


def test_argument_names_and_rows_are_checked():
    with pytest.raises(
        nl.errors.ConfigError, match="two_calls has no argument 'labels'. Its arguments"
    ):
        smp.step(non_split_inputs=["labels"])(two_calls)
    model = ready({"microbatches": 4})
    with pytest.raises(
        nl.errors.DataError, match="ids has 6 rows along dim 0, not a multiple of microbatches = 4"
    ):
        smp.step(two_calls)(model, families.batch(0, 6)["input_ids"])
    model.eval()
    with pytest.raises(nl.errors.NearlinearError, match="of a model in eval mode"):
        smp.step(two_backwards)(model, families.batch(0, 8)["input_ids"])


def test_model_backward_outside_a_step():
    model = ready({})
    ids = families.batch(0, 2)["input_ids"]
    model.backward(model(ids, labels=ids).loss)
    assert all(parameter.grad is not None for parameter in model.parameters())
    pipe = nl.shard(nl.pipeline(families.build("gpt2")))
    with pytest.raises(
        nl.errors.NearlinearError, match="must be called in a function under @smp.step"
    ):
        pipe.backward(torch.zeros(()))


def test_collect_outputs_keeps_nesting_and_graphs():
    graph = torch.ones(2, requires_grad=True) * 2
    found = collect_outputs([(1, {"a": graph}), (3, {"a": graph})], detach=False)
    assert isinstance(found, tuple) and found[0].reduce_mean() == 2
    assert found[1]["a"].outputs[0].requires_grad
    assert not found[1]["a"].detach().concat().requires_grad
    assert StepOutput([graph, graph]).stack().shape == (2, 2)
