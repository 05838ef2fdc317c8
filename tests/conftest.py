"""Settings of the whole suite: no model hub is asked, and GPU tests say why they did not run."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items):
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; torch finds none here"))
