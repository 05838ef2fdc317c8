"""Names of SMDDP before 1.4: ``import smdistributed.dataparallel.torch.distributed as dist``.

Every name but those below is that of ``torch.distributed``.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ...config.parallel import whole_number
from . import torch_smddp


def init_process_group(backend: str = torch_smddp.NAME, *args: Any, **kwargs: Any) -> None:
    """Join the ranks of the job over the backend ``"smddp"``, unless another one is named."""
    if not dist.is_initialized():
        dist.init_process_group(backend, *args, **kwargs)


def get_local_rank() -> int:
    """Return the rank within this machine, from ``LOCAL_RANK``."""
    return whole_number("LOCAL_RANK", 0)


def __getattr__(name: str) -> Any:
    return getattr(dist, name)
