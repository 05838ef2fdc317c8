"""What routers cost: Hugging Face's load balancing loss, the z-loss, and how they are averaged."""

import pytest
import torch

import nearlinear as nl
from nearlinear.parallel.expert.losses import load_balancing_loss, z_loss
from tests.support import mixtures, parity, tiny

EP = "expert_parallel_degree"


def batches(count: int, padded: bool) -> list[dict]:
    found = [tiny.batch(tiny.rows(i, 2)) for i in range(count)]
    for i, batch in enumerate(found if padded else ()):
        mask = torch.ones_like(batch["input_ids"])
        mask[0, : 3 + i] = 0  # as padded on the left
        batch["attention_mask"] = mask
        batch["labels"] = batch["input_ids"].masked_fill(mask == 0, -100)
    return found


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_load_balancing_is_hugging_faces(masked, top_k):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    torch.manual_seed(0)
    logits = [torch.randn(24, 8) for _ in range(3)]
    mask = torch.randint(0, 2, (3, 8)) if masked else None
    expected = load_balancing_loss_func(tuple(logits), 8, top_k, mask)
    counted = mask.reshape(-1) if masked else None
    found = load_balancing_loss(logits, top_k, counted)
    torch.testing.assert_close(found, expected)


def test_even_routing_costs_top_k():
    eye = torch.eye(4).repeat(5, 1)
    assert load_balancing_loss([eye, eye], 1).item() == pytest.approx(1.0)
    assert load_balancing_loss([100 * torch.tensor([[1.0, 0, 0, 0]])], 1).item() == pytest.approx(4)


def test_z_loss_by_hand():
    rows = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
    log2 = torch.tensor(2.0).log()
    assert z_loss([rows]).item() == pytest.approx((log2**2 + (3 + log2) ** 2).item() / 2)
    assert z_loss([rows, rows], torch.tensor([0, 1])).item() == pytest.approx((3 + log2) ** 2)


def alone(count, padded, z, config):
    """Gradients of the mean of the batches' losses, by targets, of the untouched model."""
    model = mixtures.build("mixtral", 4, **config)
    found, losses = batches(count, padded), []
    targets = [(batch["labels"][:, 1:] != -100).sum() for batch in found]
    for batch, mine in zip(found, targets, strict=True):
        output = model(**batch, output_router_logits=bool(config) or bool(z))
        loss = output.loss
        if z:
            kept = batch.get("attention_mask", torch.ones_like(batch["labels"])).reshape(-1) == 1
            squares = [layer[kept].logsumexp(-1) ** 2 for layer in output.router_logits]
            loss = loss + z * torch.cat(squares).mean()
        (loss * mine / sum(targets)).backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters()}


LOSSES = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
Z_ONLY = {"router_aux_loss_coef": 0.0}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("model", "moe", "aux", "z"),
    [
        (LOSSES, None, LOSSES, 0),
        ({}, {"moe_load_balancing": "aux_loss", "moe_aux_loss_coeff": 0.1}, LOSSES, 0),
        (LOSSES, {"moe_z_loss_coeff": 0.05}, LOSSES, 0.05),
        ({}, {"moe_z_loss_coeff": 0.05}, Z_ONLY, 0.05),
        (LOSSES, {"moe_load_balancing": "none"}, {}, 0),
    ],
    ids=["as-the-model-says", "aux", "both", "z", "none"],
)
@pytest.mark.parametrize(
    ("ranks", "config"),
    [(2, {EP: 2}), (2, {}), (4, {EP: 2, "tensor_parallel_degree": 2})],
    ids=["ep", "whole", "ep-tp"],
)
def test_they_are_averaged_like_the_loss(ranks, config, model, moe, aux, z, padded):
    """Over 2 data ranks of 2 micro-batches each, weighted by targets."""
    losses, gradients = alone(4, padded, z, aux)

    def divided(rank):
        mesh = nl.init(config)
        sharded = nl.shard(mixtures.transformed("mixtral", 4, moe or {}, **model))
        first = 2 * mesh.data_rank(rank)
        seen = []
        for batch in nl.accumulate(sharded, batches(4, padded)[first : first + 2]):
            loss = sharded(**batch).loss
            loss.backward()
            seen.append(loss.item())
        assert seen == pytest.approx(losses[first : first + 2], abs=1e-5)
        return parity.whole(sharded, lambda parameter: parameter.grad)

    for found in nl.spmd.run(divided, ranks):
        for name, value in gradients.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0)


@pytest.mark.parametrize("asked", [True, False, None])
def test_what_the_model_returns(asked):
    kwargs = {} if asked is None else {"output_router_logits": asked}
    batch = batches(1, True)[0]
    expected = mixtures.build("mixtral", 4, **LOSSES)(**batch, output_router_logits=True)

    def outputs(rank):
        nl.init({EP: 2})
        model = nl.shard(mixtures.transformed("mixtral", 4, None, **LOSSES))
        given = {k: v for k, v in batch.items() if k not in ("input_ids", "attention_mask")}
        # by place, too: the mask is found there as well
        found = model(batch["input_ids"], batch["attention_mask"], **given, **kwargs)
        without = model(batch["input_ids"])
        assert without.loss is None and "loss" not in without and without.aux_loss > 0
        return found

    for found in nl.spmd.run(outputs, 2):
        assert found.loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
        assert found.aux_loss.item() == pytest.approx(expected.aux_loss.item(), abs=1e-5)
        if asked is False:
            assert found.router_logits is None
        else:
            torch.testing.assert_close(
                found.router_logits, expected.router_logits, atol=1e-5, rtol=0
            )


def test_a_tuple_is_refused():
    def call(rank):
        nl.init({EP: 2})
        model = nl.shard(mixtures.transformed("mixtral", 4, {"moe_z_loss_coeff": 0.1}))
        with pytest.raises(nl.NearlinearError, match="return_dict"):
            model(**batches(1, False)[0], return_dict=False)

    nl.spmd.run(call, 2)
