"""Tokens assigned to experts together, so that all have work, instead of choosing by themselves.

``sinkhorn``: S-BASE (Clark et al. 2022, "Unified Scaling Laws for Routed Language Models", section
2.2), nearly even; ``balanced``: every expert gets equally many, the aim of BASE layers (Lewis et
al. 2021), by a greedy assignment with swaps where theirs is optimal. Only in training, and without
a gradient: that goes through the weights, the router's own of whatever was assigned.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch import nn

from ...errors import ConfigError
from .dispatch import exchange

ROUNDS = 20  # of Sinkhorn's algorithm; its result is used as it then is


def sinkhorn(logits_TN: torch.Tensor, top_k: int) -> torch.Tensor:
    """Experts (T, top_k) by a transport plan that fits ``logits``: each token sends 1, each expert
    gets T / N. Source of the algorithm: Sinkhorn and Knopp 1967."""
    plan_TN = logits_TN.float()
    for _ in range(ROUNDS):
        plan_TN = plan_TN - plan_TN.logsumexp(0, keepdim=True)
        plan_TN = plan_TN - plan_TN.logsumexp(1, keepdim=True)
    return plan_TN.topk(top_k).indices


def balanced(logits_TN: torch.Tensor, top_k: int) -> torch.Tensor:
    """Experts (T, top_k), every one T x top_k / N times; where that is no whole number, those that
    are wanted most once more. Tokens ask for the best expert that has room, experts take the most
    probable ones, until all are full."""
    wish_TN = logits_TN.float().softmax(-1).nan_to_num()
    tokens, experts = wish_TN.shape
    small, more = divmod(tokens * top_k, experts)
    room_N = wish_TN.new_full((experts,), small, dtype=torch.int64)
    room_N[wish_TN.sum(0).topk(more).indices] += 1
    chosen_TN = torch.zeros_like(wish_TN, dtype=torch.bool)
    while True:
        open_TN = ~chosen_TN & (room_N > 0) & (chosen_TN.sum(1, keepdim=True) < top_k)
        best_T, expert_T = wish_TN.where(open_TN, -1.0).max(1)
        if bool((best_T < 0).all()):
            break
        expert_T = expert_T.where(best_T >= 0, experts)  # those that have all, or find no room
        by_wish = best_T.argsort(descending=True, stable=True)
        order = by_wish[expert_T[by_wish].argsort(stable=True)]  # by expert, there by wish
        sizes = torch.bincount(expert_T, minlength=experts + 1)
        place = (
            torch.arange(tokens, device=order.device) - (sizes.cumsum(0) - sizes)[expert_T[order]]
        )
        rooms = torch.cat([room_N, room_N.new_zeros(1)])
        taken = order[place < rooms[expert_T[order]]]
        chosen_TN[taken, expert_T[taken]] = True
        room_N = room_N - torch.bincount(expert_T[taken], minlength=experts)
    for token in (chosen_TN.sum(1) < top_k).nonzero().flatten().tolist():
        while int(chosen_TN[token].sum()) < top_k:
            _swap(token, chosen_TN, room_N, wish_TN)
    return wish_TN.where(chosen_TN, -1.0).topk(top_k).indices


def _swap(token: int, chosen_TN, room_N, wish_TN) -> None:
    """Only experts that ``token`` has already have room: another goes there, and leaves it its own.

    Some token always can: fewer than T x K / N have that expert, and those that have not have K
    others, of which ``token`` has at most K - 2.
    """
    free = int(room_N.argmax())
    may_TN = chosen_TN & ~chosen_TN[:, free : free + 1] & ~chosen_TN[token]
    gain_TN = wish_TN[:, free : free + 1] - wish_TN + wish_TN[token]
    other, expert = divmod(int(gain_TN.where(may_TN, -torch.inf).argmax()), wish_TN.shape[1])
    chosen_TN[other, expert], chosen_TN[other, free], chosen_TN[token, expert] = False, True, True
    room_N[free] -= 1


ASSIGNMENTS = {"sinkhorn": sinkhorn, "balanced": balanced}


class AssigningRouter:
    """Before the model's own class in a router: in training tokens are assigned together."""

    assignment: str
    shuffle: Shuffle | None

    def forward(self, hidden_states):
        logits_TN, weights_TK, index_TK = super().forward(hidden_states)
        if not self.training:
            return logits_TN, weights_TK, index_TK
        with torch.no_grad():
            assign = ASSIGNMENTS[self.assignment]
            if self.shuffle is None:
                index_TK = assign(logits_TN, self.top_k)
            else:
                index_TK = self.shuffle(assign, logits_TN, self.top_k)
        found_TK = logits_TN.float().softmax(-1).gather(1, index_TK)
        if getattr(self, "norm_topk_prob", True):
            found_TK = found_TK / found_TK.sum(-1, keepdim=True)
        return logits_TN, found_TK.to(weights_TK.dtype), index_TK


class Shuffle:
    """Assign a random part of all ranks' tokens: what one rank reads is alike.

    Only logits travel, and the experts back; the same places every time, so that a checkpointed
    block that runs again finds the same experts.
    """

    def __init__(self, group: dist.ProcessGroup, seed: int):
        self.group, self.seed = group, seed + group.rank()

    def __call__(self, assign, logits_TN: torch.Tensor, top_k: int) -> torch.Tensor:
        tokens, ranks = len(logits_TN), self.group.size()
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(tokens, generator=generator).to(logits_TN.device)
        small, more = divmod(tokens, ranks)
        out = [small + (rank < more) for rank in range(ranks)]
        sent = torch.tensor(out, device=logits_TN.device)
        back = torch.empty_like(sent)
        dist.all_to_all_single(back, sent, group=self.group)
        back = back.tolist()
        index_RK = assign(exchange(logits_TN[order], out, back, self.group), top_k)
        return exchange(index_RK, back, out, self.group)[order.argsort()]


KNOWN = ("MixtralTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter")
"""Routers whose weights are the softmax of their logits, among the chosen or among all."""


@cache
def assigning_class(kind: type) -> type:
    return type(f"Assigning{kind.__name__}", (AssigningRouter, kind), {"__module__": __name__})


def assign_together(router: nn.Module, assignment: str, shuffle: Shuffle | None) -> None:
    """Have ``router`` assign as asked. Raises ConfigError for one that weighs in another way."""
    kind = type(router)
    if kind.__name__ not in KNOWN:
        raise ConfigError(
            f"moe_load_balancing = {assignment!r}: how {kind.__name__} weighs experts that it has "
            "not chosen is not known here: use 'none' or 'aux_loss'"
        )
    router.__class__ = assigning_class(kind)
    router.assignment, router.shuffle = assignment, shuffle
