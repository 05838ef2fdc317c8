"""SMP v1's registration of distributed modules that the script defines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ...errors import ConfigError
from .session import session_or_none


def tp_register(
    dist_module: type[nn.Module],
    init_hook: Callable | None = None,
    forward_hook: Callable | None = None,
    return_hook: Callable | None = None,
) -> Callable[[type], type]:
    """Decorate a module class whose distributed form is ``dist_module``.

    With ``tensor_parallel_degree = 1`` the class itself is used. With a higher one this raises:
    layers are divided by `nearlinear.transform`, which knows the models of transformers.

    Raises:
        ConfigError: ``tensor_parallel_degree`` is above 1.
    """

    def register(kind: type) -> type:
        tp_register_with_module(kind, dist_module, init_hook, forward_hook, return_hook)
        return kind

    return register


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[nn.Module],
    init_hook: Callable | None = None,
    forward_hook: Callable | None = None,
    return_hook: Callable | None = None,
) -> None:
    """Register ``dist_module`` for ``module_cls``, like `tp_register`."""
    found: Any = session_or_none()
    if found is not None and found.runtime.mesh.tensor > 1:
        raise ConfigError(
            f"smp.tp_register: {dist_module.__name__} would divide {module_cls.__name__} by "
            "itself, and nearlinear divides the layers of transformers' causal language models "
            "only. Set tensor_parallel_degree = 1."
        )
