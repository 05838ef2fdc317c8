"""Marks of tests that ask for more than the oldest supported release of torch has."""

import pytest

from nearlinear import _torch

needs_hooks = pytest.mark.skipif(
    not _torch.communicates_by_hooks(),
    reason="FSDP2 of this torch takes no collectives: the features that stand on them are off",
)
