"""Expert parallelism: a mixture's experts divided among ranks, tokens sent to them and back."""

from .config import MoEConfig
from .transform import apply, parallel_experts

__all__ = ["MoEConfig", "apply", "parallel_experts"]
