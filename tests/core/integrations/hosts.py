"""Set-up of the tests of hosts."""

import torch

import nearlinear as nl
from tests.support import tiny


class Tokens(torch.utils.data.Dataset):
    """Rows with different numbers of targets."""

    def __len__(self):
        return 256

    def __getitem__(self, i):
        ids = tiny.rows(i, 1)[0]
        labels = ids.clone()
        labels[: i % 5] = -100
        return {"input_ids": ids, "labels": labels}


def model():
    torch.manual_seed(0)
    return tiny.llama(2)


def loaded(rank, folder, steps, groups):
    """Return the weights that `nl.load` reads at the layout of these ranks.

    The optimizer has ``groups`` groups of parameters, as Trainer's or as a plain one.
    """
    nl.init({"hybrid_shard_degree": 2})
    with nl.spmd.one_at_a_time(seed=1):
        given = tiny.llama(2)
    nl.shard(given)
    parameters = list(given.parameters())
    decaying, other = ([p for p in parameters if (p.dim() > 1) == decays] for decays in (1, 0))
    optimizer = torch.optim.AdamW(
        parameters if groups == 1 else [{"params": decaying}, {"params": other}]
    )
    assert nl.load(folder, given, optimizer) == steps
    assert sum(each["exp_avg_sq"].sum().full_tensor() for each in optimizer.state.values()) > 0
    return {name: p.full_tensor().detach() for name, p in given.named_parameters()}
