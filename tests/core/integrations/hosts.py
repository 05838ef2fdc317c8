"""Set-up of the tests of hosts."""

import re
from pathlib import Path

import torch

import nearlinear as nl
from tests.support import tiny

PAGE = Path(nl.__file__).parents[2] / "docs" / "howto" / "hosts.md"
MAX_CHANGED_LINES = 3


def documented(host):
    """Return the page's script for a host alone, and the changed one."""
    diffs = re.findall(r"```diff\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (diff,) = [text for text in diffs if f"nearlinear.integrations.{host}" in text]
    lines = diff.splitlines()
    assert 0 < sum(line.startswith("+") for line in lines) <= MAX_CHANGED_LINES
    return ["\n".join(line[1:] for line in lines if line[:1] != other) for other in "+-"]


class Tokens(torch.utils.data.Dataset):
    """Rows with different numbers of targets, unless ``even``."""

    def __init__(self, even=False):
        self.even = even

    def __len__(self):
        return 256

    def __getitem__(self, i):
        ids = tiny.rows(i, 1)[0]
        labels = ids.clone()
        labels[: 0 if self.even else i % 5] = -100
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
