"""Numbers of targets: gradients of uneven batches equal those of one process, for any loss."""

import pytest
import torch
from torch.nn import functional

import nearlinear as nl
from nearlinear.fsdp import targets
from tests.support import objectives, tiny

NO_SHIFT = ["t5", "bart", "bart_causal", "whisper", "bert", "bert_tokens", "roberta", "modernbert"]


def gradients(rank, name, given, parts=2, checkpoint=False):
    """Gradients of two equal steps: the first one measures targets, the second may know them."""
    mesh = nl.init({"hybrid_shard_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = objectives.build(name)
    nl.shard(model)
    if checkpoint:
        nl.checkpoint_activations(model)
    own = objectives.part(given, mesh.data_rank(rank), mesh.data_ranks)
    steps = []
    for _ in range(2):
        model.zero_grad()
        for batch in nl.accumulate(model, [objectives.part(own, i, parts) for i in range(parts)]):
            model(**batch).loss.backward()
        found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        steps.append({key: gradient.full_tensor() for key, gradient in found.items()})
    return steps


def assert_equal_one_process(name, side="right", ranks=2, checkpoint=False):
    given = objectives.batch(name, side)
    expected = objectives.reference(name, given)
    runs = nl.spmd.run(gradients, ranks, args=(name, given, 2, checkpoint))
    for found in (step for steps in runs for step in steps):
        assert expected.keys() <= found.keys()
        for key, gradient in found.items():  # zero for parameters that no batch uses
            whole = expected.get(key, torch.zeros_like(gradient))
            torch.testing.assert_close(gradient, whole, atol=1e-6, rtol=1e-4, msg=key)


@pytest.mark.parametrize("name", ["llama", *NO_SHIFT, "xlm_roberta", "bert_multi_label", "vit"])
def test_uneven_batches_equal_one_process(name):
    assert_equal_one_process(name)


@pytest.mark.parametrize(
    ("name", "side"),
    [("llama", "packed"), ("llama", "left"), ("t5", "none"), ("t5", "left"), ("bert", "packed")],
)
def test_every_padding_equals_one_process(name, side):
    assert_equal_one_process(name, side, ranks=4)


@pytest.mark.parametrize("name", ["t5", "bert"])
def test_checkpointed_models_equal_one_process(name):
    assert_equal_one_process(name, checkpoint=True)


class Custom(torch.nn.Module):
    """Model with a loss of its own, outside of transformers."""

    def __init__(self, loss):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.loss = loss

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x)
        return {"loss": self.loss(x, labels)}


def cross_entropy(logits, labels, **options):
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def by_hand(logits, labels):
    counted = labels != -100
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(0).unsqueeze(-1)).squeeze(-1)
    return -(chosen * counted).sum() / counted.sum()


def two_means(logits, labels):
    return cross_entropy(logits, labels) + functional.mse_loss(logits, torch.zeros_like(logits))


def run_custom(rank, loss, weight=None):
    nl.init({"hybrid_shard_degree": 1})
    with nl.spmd.one_at_a_time(seed=0):
        model = Custom(loss)
    nl.shard(model)
    for batch in nl.accumulate(model, [custom_batch(rank)], weight=weight):
        model(**batch)["loss"].backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def custom_batch(rank):
    generator = torch.Generator().manual_seed(rank)
    labels = torch.randint(0, 4, (2, 3), generator=generator)
    labels[rank:, 1:] = -100
    return {"x": torch.randn(2, 3, 4, generator=generator), "labels": labels}


@pytest.mark.parametrize(
    ("loss", "weight"),
    [(cross_entropy, None), (by_hand, lambda batch: float((batch["labels"] != -100).sum()))],
)
def test_losses_of_other_models(loss, weight):
    torch.manual_seed(0)
    model, batches = Custom(cross_entropy), [custom_batch(rank) for rank in range(2)]
    whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    model(**whole)["loss"].backward()
    for found in nl.spmd.run(run_custom, 2, args=(loss, weight)):
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


def test_a_loss_that_ignores_another_label_is_measured_in_every_step():
    """Its first step could have been that of a rule; the second one contains an ignored label."""

    def loss(logits, labels):
        return cross_entropy(logits, labels, ignore_index=3)

    def batch(rank, step):
        generator = torch.Generator().manual_seed(rank)
        labels = torch.randint(0, 3, (2, 3), generator=generator)
        labels[:, rank + 1 :] = 3 if step else 2
        return {"x": torch.randn(2, 3, 4, generator=generator), "labels": labels}

    def on_rank(rank):
        nl.init({"hybrid_shard_degree": 1})
        with nl.spmd.one_at_a_time(seed=0):
            model = Custom(loss)
        nl.shard(model)
        for step in range(2):
            model.zero_grad()
            for given in nl.accumulate(model, [batch(rank, step)]):
                model(**given)["loss"].backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    torch.manual_seed(0)
    model = Custom(loss)
    parts = [batch(rank, 1) for rank in range(2)]
    model(**{key: torch.cat([part[key] for part in parts]) for key in parts[0]})["loss"].backward()
    for found in nl.spmd.run(on_rank, 2):
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (by_hand, "the labels it counts are unknown"),
        (two_means, "sum of means over"),
        (lambda logits, labels: cross_entropy(logits, labels, reduction="sum") / 3, "unknown"),
    ],
)
def test_unknown_losses_are_refused(loss, reason):
    def on_rank(rank):
        with pytest.raises(nl.errors.NearlinearError, match=rf"(?s){reason}.*weight=lambda"):
            run_custom(rank, loss)

    nl.spmd.run(on_rank, 2)


@pytest.mark.parametrize(
    ("layout", "error"),
    [
        ({"hybrid_shard_degree": 1, "pipeline_parallel_degree": 2}, "labels it counts"),
        ({"context_parallel_degree": 2}, "loss_function of LlamaForCausalLM is not"),
        ({"tensor_parallel_degree": 2}, "loss_function of LlamaForCausalLM is not"),
    ],
)
def test_unknown_losses_of_divided_models_are_refused(layout, error):
    """No rank computes the whole loss, so that it can be neither measured nor replaced."""

    def on_rank(rank):
        nl.init(layout)
        with nl.spmd.one_at_a_time(seed=0):
            model = tiny.llama(2)
        model.loss_function = lambda logits, labels, **_: logits.square().mean()
        with pytest.raises(nl.errors.NearlinearError, match=error):
            model = nl.shard(nl.pipeline(nl.transform(model)))
            next(iter(nl.accumulate(model, [tiny.batch(tiny.rows(0, 2))])))

    nl.spmd.run(on_rank, 2)


def test_labels_changed_inside_the_model_are_refused():
    """A model that the rule fits by its class, but whose forward pass drops targets."""

    def on_rank(rank):
        nl.init({"hybrid_shard_degree": 2})
        with nl.spmd.one_at_a_time(seed=0):
            model = tiny.gpt2(2)
        loss = model.loss_function
        model.loss_function = lambda logits, labels, vocab_size, **rest: loss(
            logits, labels.masked_fill(labels > 30, -100), vocab_size, **rest
        )
        nl.shard(model)
        with pytest.raises(nl.errors.NearlinearError, match="another number of targets"):
            for batch in nl.accumulate(model, [tiny.batch(tiny.rows(rank, 2))]):
                model(**batch).loss.backward()

    nl.spmd.run(on_rank, 2)


@pytest.mark.parametrize(("name", "shifted"), [("llama", True), ("modernbert", False)])
def test_rule_of_a_loss_function_is_known_before_the_first_step(name, shifted):
    assert targets.target_rule(objectives.build(name)) == targets.TargetRule(shifted)


@pytest.mark.parametrize("name", ["bart_causal", "t5", "bert"])
def test_rule_of_an_inline_loss_is_unknown_before_the_first_step(name):
    model = objectives.build(name)
    assert targets.target_rule(model) is None
    with pytest.raises(nl.errors.NearlinearError, match="nl.accumulate"):
        targets.count_targets(model, objectives.batch(name))


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"labels": torch.tensor([1, -100, 1])}, 2),
        ({"x": torch.zeros(4, 2)}, 4),
        ((torch.zeros(5, 1), torch.zeros(5)), 5),
        (torch.zeros(6, 2), 6),
    ],
)
def test_batches_without_token_labels_count_samples(batch, count):
    assert targets.count_targets(torch.nn.Linear(1, 1), batch) == count
