"""Markers of tests that need more than the oldest supported torch release."""

import pytest

from nearlinear import _torch

needs_hooks = pytest.mark.skipif(
    not _torch.supports_custom_collectives(),
    reason="this torch release does not support custom collectives in FSDP2",
)
