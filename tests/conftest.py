"""Settings of the whole suite: no model hub is asked, a process computes on one core, examples may
take their time, and GPU tests say why they did not run.
"""

import os

import hypothesis
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Set before torch is imported. The models are tiny: threads for one operation would mostly wait for
# each other, spinning, on the cores of the tests that run beside this one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("any machine", deadline=None)  # nothing is asserted on time
hypothesis.settings.load_profile("any machine")


def pytest_collection_modifyitems(items):
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; torch finds none here"))
