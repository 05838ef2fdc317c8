"""Route tokens to experts: dispatch to the ranks of the experts, router losses, even assignments.

Dispatch: GShard (Lepikhin et al. 2020, section 3.2) without expert capacity: ranks exchange sizes
first, so no token is dropped and no slot is padded. A token is sent once for each of its experts.
The model's own module computes the received rows, with fewer experts. Shapes: T tokens, K experts
per token, P = T x K pairs, R received rows, E hidden, N experts.

Assignments: ``sinkhorn`` is S-BASE (Clark et al. 2022, "Unified Scaling Laws for Routed Language
Models", section 2.2), nearly even. ``balanced`` gives every expert equally many tokens, the aim of
BASE layers (Lewis et al. 2021), by a greedy assignment with swaps instead of an optimal one. Both
apply in training only and have no gradient; the gradient flows through the router's weights of the
assigned experts.

Losses: load balancing of Switch Transformer (Fedus et al. 2021, equations 4 to 6), over all layers
jointly as in Hugging Face models, and the z-loss of ST-MoE (Zoph et al. 2022, equation 5). Both are
means over the tokens of this rank's batch, in evaluation too. They are averaged over ranks and
micro-batches like the loss itself, weighted by targets; for load balancing, that mean of losses
differs from the loss of the joined batch.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from .._torch import all_gather
from ..distributed.collectives import (
    all_gather_detached,
    all_gather_rows,
    reduce_scatter_rows,
    transform_grad,
)
from ..errors import ConfigError, NearlinearError


class ParallelExperts:
    """``forward`` of a module that holds the experts of this rank.

    Args:
        experts: Module of stacked experts, whose parameters are split.
        group: Ranks that hold the other experts.
        by_all_to_all: Dispatch tokens by all-to-all instead of all-gather.
    """

    def __init__(self, experts: Any, group: dist.ProcessGroup, by_all_to_all: bool):
        self.experts, self.group, self.by_all_to_all = experts, group, by_all_to_all

    @property
    def num_experts(self) -> int:
        return self.experts.num_experts

    def __call__(self, hidden_states, top_k_index, top_k_weights):
        """Compute (T, E) from tokens (T, E), their experts (T, K) and weights (T, K)."""
        dispatch = _by_all_to_all if self.by_all_to_all else _by_all_gather
        return dispatch(self, hidden_states, top_k_index, top_k_weights)

    def compute(self, x_RE: torch.Tensor, expert_R: torch.Tensor) -> torch.Tensor:
        """Compute rows, possibly none, each with one of this rank's experts.

        Gradients of experts are averaged over the ranks with the same experts, all other gradients
        over all ranks that share model states, which are ``group.size()`` times as many. The rows
        here come from all ranks of the group, so the gradient is divided before the experts and
        restored after them. FSDP2 on gloo supports averaging only, with no other factor.
        """
        ranks, rows = self.group.size(), len(x_RE)
        if rows == 0:  # keep a graph: the all-to-all of the backward pass needs every rank
            x_RE = functional.pad(x_RE, (0, 0, 0, 1))
            expert_R = functional.pad(expert_R, (0, 1))
        x_RE = scale_gradient(x_RE, ranks)
        ones_R1 = x_RE.new_ones(len(x_RE), 1)
        experts = self.experts
        y_RE = type(experts).forward(experts, x_RE, expert_R.unsqueeze(1), ones_R1)
        return scale_gradient(y_RE, 1 / ranks)[:rows]


def install_parallel_experts(experts: Any, group: dist.ProcessGroup, by_all_to_all: bool) -> None:
    """Replace the forward of ``experts``, whose parameters are split already."""
    experts.num_experts //= group.size()
    experts.forward = ParallelExperts(experts, group, by_all_to_all)


def _by_all_to_all(experts: ParallelExperts, x_TE, index_TK, weights_TK) -> torch.Tensor:
    """Send each (token, expert) pair to the rank of the expert, and the results back."""
    group, mine = experts.group, experts.num_experts
    expert_P = index_TK.flatten()
    order_P = expert_P.argsort(stable=True)
    sent = torch.bincount(expert_P, minlength=group.size() * mine)  # rows per expert
    received = torch.empty_like(sent)  # rows per sending rank and expert of this rank
    dist.all_to_all_single(received, sent, group=group)
    sizes = sent.view(-1, mine).sum(1), received.view(-1, mine).sum(1)
    out, back = torch.stack(sizes).tolist()
    x_RE = _Exchange.apply(x_TE[order_P // index_TK.shape[1]], out, back, group)
    local = torch.arange(mine, device=received.device).repeat(group.size())
    y_RE = experts.compute(x_RE, local.repeat_interleave(received))
    y_PE = _Exchange.apply(y_RE, back, out, group)
    y_TKE = y_PE[order_P.argsort()].view(*index_TK.shape, -1)
    return (y_TKE * weights_TK.unsqueeze(-1)).sum(1).to(x_TE.dtype)


def _by_all_gather(experts: ParallelExperts, x_TE, index_TK, weights_TK) -> torch.Tensor:
    """All-gather the tokens and reduce-scatter the outputs; batch sizes of ranks may differ."""
    group, mine = experts.group, experts.num_experts
    tokens = len(x_TE)
    sizes = torch.empty(group.size(), dtype=torch.int64, device=x_TE.device)
    all_gather(sizes, sizes.new_tensor([tokens]), group=group)
    missing = int(sizes.max()) - tokens
    index_AK = all_gather_detached(
        functional.pad(index_TK, (0, 0, 0, missing), value=-1), group
    )  # A: all
    weights_AK = all_gather_rows(functional.pad(weights_TK, (0, 0, 0, missing)), group)
    x_AE = all_gather_rows(functional.pad(x_TE, (0, 0, 0, missing)), group)
    first = group.rank() * mine
    token_R, slot_R = ((index_AK >= first) & (index_AK < first + mine)).nonzero(as_tuple=True)
    y_RE = experts.compute(x_AE[token_R], index_AK[token_R, slot_R] - first)
    y_RE = (y_RE * weights_AK[token_R, slot_R].unsqueeze(-1)).to(x_TE.dtype)
    y_AE = torch.zeros_like(x_AE).index_add(0, token_R, y_RE)
    y_TE = reduce_scatter_rows(y_AE, group)
    return functional.pad(y_TE, (0, 0, 0, -missing)) if missing else y_TE


def scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return ``tensor``; multiply its gradient by ``factor``."""
    return transform_grad(tensor, lambda gradient: gradient * factor)


def exchange(rows: torch.Tensor, out: list[int], back: list[int], group) -> torch.Tensor:
    """All-to-all: send ``out[i]`` of ``rows`` to rank i, receive ``back[i]`` rows from it."""
    received = rows.new_empty(sum(back), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), back, out, group=group)
    return received


class _Exchange(torch.autograd.Function):
    """Differentiable `exchange`."""

    @staticmethod
    def forward(ctx, rows, out, back, group):
        ctx.reverse = (back, out, group)
        return exchange(rows, out, back, group)

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient, *ctx.reverse), None, None, None


def load_balancing_loss(logits: list[torch.Tensor], top_k: int, counted_T=None) -> torch.Tensor:
    """Return the load-balancing loss of the router ``logits`` (T, N) of all layers.

    N times the sum over experts of its share of the tokens times its mean probability; equals
    ``top_k`` if both are even. ``counted_T`` masks padding tokens.
    """
    probabilities = [layer.float().softmax(-1) for layer in logits]
    experts = logits[0].shape[-1]
    if counted_T is None:
        counted_T = torch.ones(len(logits[0]), device=logits[0].device)
    weight_T1 = counted_T.float().unsqueeze(-1)
    rows = weight_T1.sum() * len(logits)
    mean_N = sum((p_TN * weight_T1).sum(0) for p_TN in probabilities) / rows
    assigned_N = torch.zeros_like(mean_N)
    for p_TN in probabilities:
        index_TK = p_TN.detach().topk(top_k).indices
        assigned_N.index_add_(0, index_TK.flatten(), weight_T1.expand(-1, top_k).flatten())
    return experts * (assigned_N / rows * mean_N).sum()


def z_loss(logits: list[torch.Tensor], counted_T=None) -> torch.Tensor:
    """Return the mean square of the logsumexp over tokens and layers."""
    squares_LT = torch.stack([layer.float().logsumexp(-1).square() for layer in logits])
    if counted_T is None:
        return squares_LT.mean()
    return (squares_LT * counted_T).sum() / (counted_T.sum() * len(logits))


@dataclass
class RouterLosses:
    """Collect router logits during a forward pass and add the router losses to the model's loss."""

    aux: float
    z: float
    ranks: int = 1
    """Tensor ranks, which compute the same tokens and sum their gradients."""
    logits: list[torch.Tensor] | None = None
    """Logits of the current forward pass, or None outside of one."""
    return_logits: bool = False
    """True if the caller requests the logits."""

    def install(self, model: Any, routers: list[Any]) -> None:
        """Install hooks on ``model`` and its routers; they replace the model's own losses."""
        self.top_k = getattr(routers[0], "top_k", 0)
        self.config = model.config
        self.signature = inspect.signature(type(model).forward)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._add, with_kwargs=True)
        for router in routers:
            router.register_forward_hook(self._collect)

    def _begin(self, model, args, kwargs):
        self.logits = []
        requested = kwargs.get("output_router_logits")
        default = getattr(self.config, "output_router_logits", False)
        self.return_logits = default if requested is None else requested
        if "output_router_logits" in self.signature.parameters:
            kwargs = {**kwargs, "output_router_logits": False}
        return args, kwargs

    def _collect(self, router, args, output) -> None:
        if self.logits is not None:  # None while a checkpointed block is recomputed
            self.logits.append(output[0])

    def _add(self, model, args, kwargs, output):
        logits, self.logits = self.logits or [], None
        if isinstance(output, tuple):
            raise NearlinearError(
                "router losses need named outputs. Call the model without return_dict=False."
            )
        given = self.signature.bind(model, *args, **kwargs).arguments
        mask = given.get("attention_mask")
        counted_T = mask.reshape(-1) if mask is not None and mask.dim() == 2 else None
        more = 0.0
        if self.aux:
            output["aux_loss"] = load_balancing_loss(logits, self.top_k, counted_T)
            more = more + self.aux * output["aux_loss"]
        if self.z:
            more = more + self.z * z_loss(logits, counted_T)
        if isinstance(more, torch.Tensor) and output.get("loss") is not None:
            output["loss"] = output["loss"] + scale_gradient(more, 1 / self.ranks)
        if self.return_logits:
            output["router_logits"] = tuple(logits)
        return output


SINKHORN_ROUNDS = 20
"""Iterations of Sinkhorn's algorithm, without a convergence test."""


def sinkhorn(logits_TN: torch.Tensor, top_k: int) -> torch.Tensor:
    """Assign experts (T, top_k) by a transport plan in which each token sends 1 and each expert
    receives T / N. Source of the algorithm: Sinkhorn and Knopp 1967."""
    plan_TN = logits_TN.float()
    for _ in range(SINKHORN_ROUNDS):
        plan_TN = plan_TN - plan_TN.logsumexp(0, keepdim=True)
        plan_TN = plan_TN - plan_TN.logsumexp(1, keepdim=True)
    return plan_TN.topk(top_k).indices


def balanced(logits_TN: torch.Tensor, top_k: int) -> torch.Tensor:
    """Assign experts (T, top_k) so that each gets T x top_k / N tokens; if that is not a whole
    number, the most popular experts get one more. Tokens propose to the best expert with room, and
    experts accept the most probable proposals, until all are full."""
    preference_TN = logits_TN.float().softmax(-1).nan_to_num()
    tokens, experts = preference_TN.shape
    small, more = divmod(tokens * top_k, experts)
    room_N = preference_TN.new_full((experts,), small, dtype=torch.int64)
    room_N[preference_TN.sum(0).topk(more).indices] += 1
    chosen_TN = torch.zeros_like(preference_TN, dtype=torch.bool)
    while True:
        open_TN = ~chosen_TN & (room_N > 0) & (chosen_TN.sum(1, keepdim=True) < top_k)
        best_T, expert_T = preference_TN.where(open_TN, -1.0).max(1)
        if bool((best_T < 0).all()):
            break
        expert_T = expert_T.where(
            best_T >= 0, experts
        )  # complete tokens, and those without an open expert
        by_preference = best_T.argsort(descending=True, stable=True)
        order = by_preference[
            expert_T[by_preference].argsort(stable=True)
        ]  # by expert, then by preference
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
            _swap(token, chosen_TN, room_N, preference_TN)
    return preference_TN.where(chosen_TN, -1.0).topk(top_k).indices


def _swap(token: int, chosen_TN, room_N, preference_TN) -> None:
    """Move another token to the expert with room and give its expert to ``token``.

    Needed if only experts that ``token`` has already have room. A suitable token always exists:
    fewer than T x K / N tokens have that expert, and each of the rest has K other experts, of which
    ``token`` has at most K - 2.
    """
    free = int(room_N.argmax())
    may_TN = chosen_TN & ~chosen_TN[:, free : free + 1] & ~chosen_TN[token]
    gain_TN = preference_TN[:, free : free + 1] - preference_TN + preference_TN[token]
    other, expert = divmod(int(gain_TN.where(may_TN, -torch.inf).argmax()), preference_TN.shape[1])
    chosen_TN[other, expert], chosen_TN[other, free], chosen_TN[token, expert] = False, True, True
    room_N[free] -= 1


ASSIGNMENTS = {"sinkhorn": sinkhorn, "balanced": balanced}


class AssigningRouter:
    """``forward`` of a router that assigns its tokens jointly in training."""

    def __init__(self, router: Any, assignment: str, shuffle: TokenShuffle | None):
        self.router, self.assignment, self.shuffle = router, assignment, shuffle

    def __call__(self, hidden_states):
        router = self.router
        logits_TN, weights_TK, index_TK = type(router).forward(router, hidden_states)
        if not router.training:
            return logits_TN, weights_TK, index_TK
        with torch.no_grad():
            assign = ASSIGNMENTS[self.assignment]
            if self.shuffle is None:
                index_TK = assign(logits_TN, router.top_k)
            else:
                index_TK = self.shuffle(assign, logits_TN, router.top_k)
        probability_TK = logits_TN.float().softmax(-1).gather(1, index_TK)
        if getattr(router, "norm_topk_prob", True):
            probability_TK = probability_TK / probability_TK.sum(-1, keepdim=True)
        return logits_TN, probability_TK.to(weights_TK.dtype), index_TK


class TokenShuffle:
    """Assign a random part of all ranks' tokens, since the tokens of one rank are similar.

    Ranks exchange logits and assigned experts only. The permutation is the same in every call, so
    that a recomputed block assigns the same experts.
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


SUPPORTED_ROUTERS = (
    "MixtralTopKRouter",
    "Qwen2MoeTopKRouter",
    "Qwen3MoeTopKRouter",
    "OlmoeTopKRouter",
)
"""Routers whose weights are the softmax of their logits, over the chosen or over all experts."""


def install_assignment(router: Any, assignment: str, shuffle: TokenShuffle | None) -> None:
    """Replace the assignment of ``router``. Raises ConfigError for routers with other weights."""
    kind = type(router)
    if kind.__name__ not in SUPPORTED_ROUTERS:
        raise ConfigError(
            f"moe_load_balancing = {assignment!r} is not supported for {kind.__name__}, whose "
            "weights of unchosen experts are unknown. Use 'none' or 'aux_loss'."
        )
    router.forward = AssigningRouter(router, assignment, shuffle)
