"""load_state_dict_from_rank0: one rank has the values, all get their part."""

import pytest
import torch

import nearlinear as nl
from nearlinear.errors import ConfigError, RankError
from nearlinear.fsdp.deferred_init import Rank0Values
from tests.support import parity

SPLIT = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}


def handed_out(rank, family, config, delayed):
    nl.init(config)
    if rank == 0:
        with nl.spmd.one_at_a_time(seed=0):
            model = parity.build(family)
    elif delayed:
        with nl.deferred_init():
            model = parity.unseeded(family)
    else:
        with nl.spmd.one_at_a_time(seed=rank):
            model = parity.unseeded(family)
    model = nl.shard(nl.transform(model, load_state_dict_from_rank0=True))
    for batch in nl.accumulate(model, [parity.rows(0)]):
        loss = model(**batch).loss
        loss.backward()
    return loss.item(), parity.whole(model, lambda parameter: parameter.detach())


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize(("ranks", "config"), [(2, {}), (4, SPLIT), (8, SPLIT)])
def test_all_ranks_get_the_values_of_rank_0(ranks, config, delayed):
    for family in ("gpt2", "llama"):
        expected = parity.build(family)
        loss = expected(**parity.rows(0)).loss.item()
        found = nl.spmd.run(handed_out, ranks, args=(family, config, delayed))
        for its_loss, values in found:
            assert its_loss == pytest.approx(loss, abs=1e-5)
            for name, value in expected.named_parameters():
                assert torch.equal(values[name], value), name


def test_rank_0_frees_broadcast_values():
    like = torch.nn.Parameter(torch.empty(3))

    def work(rank):
        nl.init()
        source = Rank0Values(torch.ones(3) if rank == 0 else None, torch.device("cpu"))
        values = source.values("x", like, (3,))
        return source.source, values.tolist()

    assert nl.spmd.run(work, 2) == [(None, [1.0] * 3)] * 2


@pytest.mark.parametrize(
    ("first", "other", "words"),
    [
        (lambda: delayed("llama"), lambda: parity.unseeded("llama"), "no values on rank 0"),
        (
            lambda: parity.unseeded("llama"),
            lambda: parity.unseeded("llama").bfloat16(),
            "the model of rank 1 differs from rank 0's in names, shapes, dtypes",
        ),
        (
            lambda: parity.unseeded("llama"),
            lambda: parity.unseeded("gpt2"),
            "the model of rank 1 differs",
        ),
    ],
)
def test_different_models_are_an_error_on_all_ranks(first, other, words):
    def work(rank):
        nl.init()
        with nl.spmd.one_at_a_time():
            model = (other if rank else first)()
        with pytest.raises(ConfigError, match=words):
            nl.transform(model, load_state_dict_from_rank0=True)
        return True

    assert nl.spmd.run(work, 2) == [True, True]


def delayed(family):
    with nl.deferred_init():
        return parity.unseeded(family)


def test_rank_0_values_of_a_pipeline_are_refused():
    def work(rank):
        nl.init({"pipeline_parallel_degree": 2})
        with nl.spmd.one_at_a_time():
            model = parity.unseeded("llama")
        nl.transform(model, load_state_dict_from_rank0=True)

    with pytest.raises(RankError, match="save the model with nl.save on one rank"):
        nl.spmd.run(work, 2)
