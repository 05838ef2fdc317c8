"""Batches that a script has split over the context ranks train as whole batches do."""

import pytest
import torch

import nearlinear as nl
from nearlinear.context_parallel.batch import take
from tests.support import parity

LAYOUTS = {
    "context 2": (2, {"context_parallel_degree": 2}),
    "context 2 x replicate 2": (4, {"context_parallel_degree": 2, "hybrid_shard_degree": 2}),
    "context 2 x pipeline 2": (
        4,
        {"context_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 2},
    ),
    "context 2 x tensor 2": (4, {"context_parallel_degree": 2, "tensor_parallel_degree": 2}),
}


def prepared(rank, config, family="llama"):
    mesh = nl.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build(family)
    model = nl.transform(model, batch_is_split=True)
    model = nl.shard(nl.pipeline(model) if mesh.pipeline > 1 else model)
    at = mesh.coordinates(rank)["context"]

    def part(batch):
        return {name: take(value, at, mesh.context) for name, value in batch.items()}

    return mesh, model, part


def accumulated(rank, config):
    """Losses, gradients and norm of a step of two micro-batches with uneven labels."""
    mesh, model, part = prepared(rank, config)
    mine = parity.split(parity.rows(0), mesh.data_ranks)[mesh.data_rank(rank)]
    for batch in nl.accumulate(model, [part(each) for each in parity.split(mine, 2)]):
        parity.forward_and_backward(model, batch)
    norm = nl.clip_grad_norm_(model, float("inf"))
    return norm, parity.whole(model, parity.gradient)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_accumulated_gradients_equal_one_process(layout):
    ranks, config = LAYOUTS[layout]
    reference = parity.alone("llama", steps=1)
    for norm, gradients in nl.spmd.run(accumulated, ranks, args=(config,)):
        assert norm == pytest.approx(reference.norm, abs=1e-5)
        assert gradients  # of this rank's stage
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, reference.gradients[name], rtol=0, atol=1e-5)


def batches():
    """Padded batches, packed documents, and embeddings in the place of ids."""
    plain = parity.rows(0, 3)
    mask = torch.ones_like(plain["input_ids"])
    mask[1, 11:] = 0
    documents = torch.tensor([[*range(7), *range(9)]]).expand(3, -1)
    labels = plain["labels"].masked_fill(mask == 0, -100)
    return {
        "padded": plain | {"attention_mask": mask, "labels": labels},
        "packed": plain | {"position_ids": documents},
    }


def losses_and_logits(rank, embeddings):
    _, model, part = prepared(rank, {"context_parallel_degree": 2}, "mistral")
    found = {}
    for name, batch in batches().items():
        own = part(batch)
        whole = model(**own, use_cache=False).loss.item()
        own.pop("labels")
        found[name] = whole, model(**own, use_cache=False).logits.detach()
    given = part({"inputs_embeds": embeddings})["inputs_embeds"].requires_grad_()
    model(inputs_embeds=given, labels=part(parity.rows(0, 3))["labels"]).loss.backward()
    return found, given.grad


def test_masks_documents_and_embeddings_are_those_of_whole_sequences():
    model = parity.build("mistral")
    embeddings = model.get_input_embeddings()(parity.rows(0, 3)["input_ids"]).detach()
    found = nl.spmd.run(losses_and_logits, 2, args=(embeddings,))
    for name, batch in batches().items():
        output = model(**batch, use_cache=False)
        for rank, (of_rank, _) in enumerate(found):
            loss, logits = of_rank[name]
            assert loss == pytest.approx(output.loss.item(), abs=1e-5)
            seen = take(batch.get("attention_mask", torch.ones(3, 16)), rank, 2).bool()
            expected = take(output.logits, rank, 2)
            torch.testing.assert_close(logits[seen], expected[seen], rtol=0, atol=1e-5)
    embeddings.requires_grad_()
    model(inputs_embeds=embeddings, labels=parity.rows(0, 3)["labels"]).loss.backward()
    for rank, (_, gradient) in enumerate(found):
        expected = take(embeddings.grad, rank, 2) * 2  # sharding averages over context ranks
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5)


def uneven(rank, lengths):
    _, model, _ = prepared(rank, {"context_parallel_degree": 2})
    model(input_ids=torch.zeros(1, lengths[rank], dtype=torch.long))


@pytest.mark.parametrize("lengths", [(4, 6), (5, 5)])
def test_parts_of_different_or_odd_lengths_are_refused_on_all_ranks(lengths):
    with pytest.raises(nl.spmd.RankError, match="parts of different shapes or of an odd length"):
        nl.spmd.run(uneven, 2, args=(lengths,))
