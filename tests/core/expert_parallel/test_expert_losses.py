"""Router losses: load balancing as in transformers, z-loss, and their weighted average."""

import pytest
import torch

import nearlinear as nl
from nearlinear.expert_parallel.routing import load_balancing_loss, z_loss
from tests.support import mixtures, parity, tiny

EP = "expert_parallel_degree"


def batches(count: int, padded: bool) -> list[dict]:
    found = [tiny.batch(tiny.rows(i, 2)) for i in range(count)]
    for i, batch in enumerate(found if padded else ()):
        mask = torch.ones_like(batch["input_ids"])
        mask[0, : 3 + i] = 0  # padding on the left
        batch["attention_mask"] = mask
        batch["labels"] = batch["input_ids"].masked_fill(mask == 0, -100)
    return found


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_load_balancing_loss_equals_transformers(masked, top_k):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    torch.manual_seed(0)
    logits = [torch.randn(24, 8) for _ in range(3)]
    mask = torch.randint(0, 2, (3, 8)) if masked else None
    expected = load_balancing_loss_func(tuple(logits), 8, top_k, mask)
    counted = mask.reshape(-1) if masked else None
    found = load_balancing_loss(logits, top_k, counted)
    torch.testing.assert_close(found, expected)


def test_load_balancing_loss_of_even_and_collapsed_routing():
    eye = torch.eye(4).repeat(5, 1)
    assert load_balancing_loss([eye, eye], 1).item() == pytest.approx(1.0)
    assert load_balancing_loss([100 * torch.tensor([[1.0, 0, 0, 0]])], 1).item() == pytest.approx(4)


def test_z_loss_equals_hand_computed_values():
    rows = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
    log2 = torch.tensor(2.0).log()
    assert z_loss([rows]).item() == pytest.approx((log2**2 + (3 + log2) ** 2).item() / 2)
    assert z_loss([rows, rows], torch.tensor([0, 1])).item() == pytest.approx((3 + log2) ** 2)


def alone(count, padded, z, config):
    """Return losses of the unmodified model and gradients of their mean weighted by targets."""
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
def test_router_losses_are_averaged_by_targets(ranks, config, model, moe, aux, z, padded):
    """Two data ranks with two micro-batches each; losses are weighted by targets."""
    losses, gradients = alone(4, padded, z, aux)

    def expert_parallel_gradients(rank):
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

    for found in nl.spmd.run(expert_parallel_gradients, ranks):
        for name, value in gradients.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0)


@pytest.mark.parametrize("requested", [True, False, None])
def test_model_outputs_include_router_losses_and_logits(requested):
    kwargs = {} if requested is None else {"output_router_logits": requested}
    batch = batches(1, True)[0]
    expected = mixtures.build("mixtral", 4, **LOSSES)(**batch, output_router_logits=True)

    def outputs(rank):
        nl.init({EP: 2})
        model = nl.shard(mixtures.transformed("mixtral", 4, None, **LOSSES))
        given = {k: v for k, v in batch.items() if k not in ("input_ids", "attention_mask")}
        # positional arguments: the mask must be found among them
        found = model(batch["input_ids"], batch["attention_mask"], **given, **kwargs)
        without = model(batch["input_ids"])
        assert without.loss is None and "loss" not in without and without.aux_loss > 0
        return found

    for found in nl.spmd.run(outputs, 2):
        assert found.loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
        assert found.aux_loss.item() == pytest.approx(expected.aux_loss.item(), abs=1e-5)
        if requested is False:
            assert found.router_logits is None
        else:
            torch.testing.assert_close(
                found.router_logits, expected.router_logits, atol=1e-5, rtol=0
            )


def test_router_loss_rejects_return_dict_false():
    def call(rank):
        nl.init({EP: 2})
        model = nl.shard(mixtures.transformed("mixtral", 4, {"moe_z_loss_coeff": 0.1}))
        with pytest.raises(nl.errors.NearlinearError, match="return_dict"):
            model(**batches(1, False)[0], return_dict=False)

    nl.spmd.run(call, 2)
