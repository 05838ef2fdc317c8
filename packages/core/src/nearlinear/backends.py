"""Which library moves the bytes: torch's own backends, or nearlinear-collectives in host memory."""

import importlib

from .errors import ConfigError

IN_HOST_MEMORY = "nearlinear"


def known_to_torch(backend: str) -> str:
    """``backend``, for ``torch.distributed.init_process_group``, registered if it is ours.

    ConfigError where nearlinear-collectives is not installed or does not load.
    """
    if IN_HOST_MEMORY in backend:
        try:
            importlib.import_module("nearlinear_collectives")
        except ImportError as error:
            raise ConfigError(
                f"communication_backend = {backend!r} needs the package nearlinear-collectives "
                f"(pip install nearlinear-collectives), or set it to 'gloo': {error}"
            ) from None
    return backend


def for_device(asked: str, device_type: str) -> str:
    """What the config key ``communication_backend`` means on ranks with that device."""
    if asked == "auto":
        return "nccl" if device_type == "cuda" else "gloo"
    if asked == IN_HOST_MEMORY and device_type == "cuda":
        return f"cpu:{IN_HOST_MEMORY},cuda:nccl"
    return asked
