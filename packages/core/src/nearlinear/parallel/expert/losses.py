"""What is added to the loss for the router's sake: load balancing, and small logits.

Sources: Switch Transformer (Fedus et al. 2021, equations 4 to 6), over all layers together as
Hugging Face models have it, and ST-MoE's z-loss (Zoph et al. 2022, equation 5). Both are means over
the tokens of this rank's batch, in evaluation too, as the model's own. Over ranks and micro-batches
they are averaged like the loss itself, weighted by targets: a mean of losses, which for load
balancing is not the loss of all batches in one.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import nn

from ...errors import NearlinearError
from .dispatch import scale_gradient


def load_balancing_loss(logits: list[torch.Tensor], top_k: int, counted_T=None) -> torch.Tensor:
    """Of every layer's router ``logits`` (T, N); ``counted_T``: which tokens are no padding.

    The share of the tokens that each of the N experts got times its mean probability, added up,
    times N: ``top_k`` where both are even.
    """
    probabilities = [layer.float().softmax(-1) for layer in logits]
    experts = logits[0].shape[-1]
    if counted_T is None:
        counted_T = torch.ones(len(logits[0]), device=logits[0].device)
    weight_T1 = counted_T.float().unsqueeze(-1)
    rows = weight_T1.sum() * len(logits)
    mean_N = sum((p_TN * weight_T1).sum(0) for p_TN in probabilities) / rows
    got_N = torch.zeros_like(mean_N)
    for p_TN in probabilities:
        index_TK = p_TN.detach().topk(top_k).indices
        got_N.index_add_(0, index_TK.flatten(), weight_T1.expand(-1, top_k).flatten())
    return experts * (got_N / rows * mean_N).sum()


def z_loss(logits: list[torch.Tensor], counted_T=None) -> torch.Tensor:
    """Mean square of the logarithm of the sum of exponentials, over tokens and layers."""
    squares_LT = torch.stack([layer.float().logsumexp(-1).square() for layer in logits])
    if counted_T is None:
        return squares_LT.mean()
    return (squares_LT * counted_T).sum() / (counted_T.sum() * len(logits))


@dataclass
class RouterLosses:
    """Collects router logits while a model runs, and adds what they cost to its loss."""

    aux: float
    z: float
    ranks: int = 1  # that all have these tokens, and add up their gradients: tensor ranks
    logits: list[torch.Tensor] | None = None  # None: the model is not running
    asked: bool = False  # for the logits, by the caller

    def install(self, model: nn.Module, routers: list[nn.Module]) -> None:
        """On ``model``; what it would add by itself is added here instead, not twice."""
        self.top_k = getattr(routers[0], "top_k", 0)
        self.config = model.config
        self.takes = inspect.signature(type(model).forward)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._add, with_kwargs=True)
        for router in routers:
            router.register_forward_hook(self._collect)

    def _begin(self, model, args, kwargs):
        self.logits = []
        asked = kwargs.get("output_router_logits")
        own = getattr(self.config, "output_router_logits", False)
        self.asked = own if asked is None else asked
        if "output_router_logits" in self.takes.parameters:
            kwargs = {**kwargs, "output_router_logits": False}
        return args, kwargs

    def _collect(self, router, args, output) -> None:
        if self.logits is not None:  # else a checkpointed block runs a second time
            self.logits.append(output[0])

    def _add(self, model, args, kwargs, output):
        logits, self.logits = self.logits, None
        if isinstance(output, tuple):
            raise NearlinearError(
                "router losses need to know which output is the loss: call the model without "
                "return_dict=False"
            )
        given = self.takes.bind(model, *args, **kwargs).arguments
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
        if self.asked:
            output["router_logits"] = tuple(logits)
        return output
