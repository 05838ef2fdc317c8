"""Loss scaling by the script, for models that compute in float16 by ``torch.autocast``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...distributed import runtime as runtimes
from ...errors import NearlinearError
from ...fsdp.model_state import local_tensor


class GradScaler:
    """``torch.amp.GradScaler`` for sharded gradients: an overflow on one rank skips all ranks.

    ::

        scaler = smp.amp.GradScaler()
        ...
        model.backward(scaler.scale(loss))  # in the step function
        ...
        scaler.step(optimizer)
        scaler.update()

    Args:
        init_scale: Initial loss scale.
        growth_factor: Factor of the scale after ``growth_interval`` steps without overflow.
        backoff_factor: Factor of the scale after an overflow.
        growth_interval: Steps without overflow before the scale grows.
        enabled: False makes all methods do nothing.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ):
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.enabled = growth_interval, enabled
        self._scale, self._good_steps = init_scale if enabled else 1.0, 0
        self._overflow: bool | None = None  # None: the gradients are still scaled

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return ``outputs``, a loss, times the scale."""
        return outputs * self._scale if self.enabled else outputs

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, as for clipping. A collective call.

        Raises NearlinearError if it was called since the last `update`.
        """
        if not self.enabled:
            return
        if self._overflow is not None:
            raise NearlinearError("unscale_() was called since the last update()")
        gradients = [
            local_tensor(parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self._scale)
        finite = torch.nn.utils.get_total_norm(gradients).isfinite()
        overflows = (~finite).to(runtimes.collective_device(), torch.float32)
        dist.all_reduce(overflows)
        self._overflow = overflows.item() > 0

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call ``optimizer.step()`` unless a gradient overflowed on any rank."""
        if self.enabled and self._overflow is None:
            self.unscale_(optimizer)
        return None if self._overflow else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | None = None) -> None:
        """Adapt the scale after a step."""
        if not self.enabled:
            return
        overflow, self._overflow = self._overflow, None
        if new_scale is not None:
            self._scale = float(new_scale)
        elif overflow:
            self._scale *= self.backoff_factor
            self._good_steps = 0
        else:
            self._good_steps += 1
            if self._good_steps == self.growth_interval:
                self._scale *= self.growth_factor
                self._good_steps = 0

    def get_scale(self) -> float:
        """Return the current scale."""
        return self._scale

    def is_enabled(self) -> bool:
        """Return whether the scaler does anything."""
        return self.enabled

    def state_dict(self) -> dict[str, Any]:
        """Return the state in values that JSON can hold."""
        return {"scale": self._scale, "good_steps": self._good_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self._scale, self._good_steps = state_dict["scale"], state_dict["good_steps"]
