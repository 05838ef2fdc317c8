"""Entry point that torch calls at the end of its import, so that it knows the backend.

Imports no torch: the package itself may be what imports torch, and is then incomplete.
"""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("nearlinear_collectives")


def autoload() -> None:
    """Register the backend, unless the package is being imported and will do so itself.

    An error is logged and not raised: it would end the import of torch.
    """
    importing = sys.modules.get(f"{__package__}.backend")
    if importing is not None and not hasattr(importing, "register"):
        return
    try:
        from .backend import register

        register()
    except Exception as error:
        log.warning("the backend nearlinear is not registered: %s", error)
