"""Settings of the whole suite: no model hub is asked, a process computes on one core, examples may
take their time, what takes long begins first, and GPU tests say why they did not run.
"""

import itertools
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
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        items[:] = slow_first(items, workers)
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; torch finds none here"))


def slow_first(items: list, workers: int) -> list:
    """``items`` with the slow ones at the beginning of each of ``workers`` equal shares.

    xdist gives each worker a share, in order, and lets who is done take from the others' ends: what
    is left last is short, and no worker is alone with a test of a minute. A file stays together.
    """
    shares = [[] for _ in range(workers)]
    slow, others = (
        [item for item in items if ("slow" in item.keywords) is wanted] for wanted in (True, False)
    )
    for number, (_, of_file) in enumerate(itertools.groupby(slow, lambda item: item.path)):
        shares[number % workers] += of_file
    others = iter(others)
    for number, share in enumerate(shares, 1):
        end = len(items) * number // workers - len(items) * (number - 1) // workers
        share += itertools.islice(others, max(0, end - len(share)))
    return [item for share in shares for item in share] + list(others)
