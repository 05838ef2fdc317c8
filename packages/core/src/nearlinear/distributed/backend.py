"""Communication backends: those of torch, and nearlinear-collectives for host memory."""

import importlib

from ..errors import ConfigError

HOST_MEMORY_BACKEND = "nearlinear"


def register_backend(backend: str) -> str:
    """Register ``backend`` with torch.distributed if it is nearlinear-collectives; return it.

    Raises:
        ConfigError: nearlinear-collectives is not installed or cannot be loaded.
    """
    if HOST_MEMORY_BACKEND in backend:
        try:
            importlib.import_module("nearlinear_collectives")
        except ImportError as error:
            raise ConfigError(
                f"communication_backend = {backend!r} needs the package nearlinear-collectives "
                f"({error}). Install it with pip install nearlinear-collectives, or set "
                "communication_backend = 'gloo'."
            ) from None
    return backend


def backend_for_device(setting: str, device_type: str) -> str:
    """Resolve the config key ``communication_backend`` for ranks on ``device_type``."""
    if setting == "auto":
        return "nccl" if device_type == "cuda" else "gloo"
    if setting == HOST_MEMORY_BACKEND and device_type == "cuda":
        return f"cpu:{HOST_MEMORY_BACKEND},cuda:nccl"
    return setting
