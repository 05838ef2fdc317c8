"""Model-parallel ranks must receive the same batch with valid ids; embeddings get gradients."""

import re

import pytest
import torch

import nearlinear as nl
from nearlinear.spmd import RankError
from tests.support import parity

TOGETHER = {
    "tensor": {"tensor_parallel_degree": 2},
    "context": {"context_parallel_degree": 2},
    "pipeline": {"pipeline_parallel_degree": 2, "microbatches": 2},
}


def model_of(config):
    mesh = nl.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("llama")
    model = nl.transform(model)
    return mesh, nl.shard(nl.pipeline(model) if mesh.pipeline > 1 else model)


def read(rank, config, place):
    """Return the losses of two steps on 4 ranks; pairs of ranks share a batch."""
    mesh, model = model_of(config)
    slice_, slices = place(mesh, rank)
    found = []
    for step in range(2):
        batch = parity.split(parity.rows(step), slices)[slice_]
        found.append(parity.forward_and_backward(model, batch).item())
    return found


def by_data_rank(mesh, rank):
    return mesh.data_rank(rank), mesh.data_ranks


def by_rank(mesh, rank):
    return rank, mesh.world


@pytest.mark.parametrize("axis", TOGETHER)
def test_different_batches_of_model_parallel_ranks_are_an_error(axis):
    config = TOGETHER[axis] | {"hybrid_shard_degree": 2}
    nl.spmd.run(read, 4, args=(config, by_data_rank))
    with pytest.raises(
        RankError,
        match=rf"the {axis} parallel ranks \[\d, \d\] compute one batch tog",
    ):
        nl.spmd.run(read, 4, args=(config, by_rank))


def test_data_parallel_ranks_may_have_different_batches():
    nl.spmd.run(read, 4, args=({"hybrid_shard_degree": 2}, by_rank))
    with_experts = {"hybrid_shard_degree": 2, "expert_parallel_degree": 2}

    def work(rank):
        mesh = nl.init(with_experts)
        with nl.spmd.one_at_a_time(seed=0):
            model = parity.build("mixtral")
        model = nl.shard(nl.transform(model))
        model(**parity.split(parity.rows(0), mesh.world)[rank]).loss.backward()

    nl.spmd.run(work, 4)


def unknown(rank, config, name, token):
    _, model = model_of(config)
    batch = {key: value.clone() for key, value in parity.rows(0).items()}
    batch[name][0, -1] = token
    parity.forward_and_backward(model, batch)


@pytest.mark.parametrize("axis", ["tensor", "context"])
@pytest.mark.parametrize(("name", "token"), [("input_ids", 97), ("input_ids", -1), ("labels", 97)])
def test_ids_outside_the_vocabulary_are_an_error(axis, name, token):
    """PyTorch's own embedding and loss raise IndexError with other messages."""
    with pytest.raises(RankError) as caught:
        nl.spmd.run(unknown, 2, args=(TOGETHER[axis], name, token))
    assert isinstance(caught.value.__cause__, IndexError)
    if axis == "tensor" or name == "labels":
        message = f"token id {token} is not in the vocabulary, which has ids 0 to 96"
        assert re.search(message, str(caught.value))


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, TOGETHER["tensor"]),
        (2, TOGETHER["context"]),
        (2, TOGETHER["context"] | {"cp_comm_type": "all_gather"}),
        (4, TOGETHER["tensor"] | TOGETHER["context"]),
    ],
)
def test_input_embeddings_get_their_complete_gradient(ranks, config):
    """The gradient on every rank equals that of the original model, as prompt tuning needs."""
    batch, embeddings = parity.rows(0), torch.randn(parity.ROWS, parity.SEQUENCE, 32)
    expected = embeddings.clone().requires_grad_()
    parity.build("llama")(inputs_embeds=expected, labels=batch["labels"]).loss.backward()

    def work(rank):
        _, model = model_of(config)
        mine = embeddings.clone().requires_grad_()
        model(inputs_embeds=mine, labels=batch["labels"]).loss.backward()
        return mine.grad

    for found in nl.spmd.run(work, ranks):
        torch.testing.assert_close(found, expected.grad, rtol=0, atol=1e-6)
