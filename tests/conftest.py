"""Settings of the test suite: offline model hubs, one core per process, Ctrl-C, no hypothesis
deadline, slow tests first, cheap garbage collection, the end of each test's job, a skip reason for
GPU tests, and a stub of torchvision.
"""

import gc
import itertools
import os
import signal
import sys
from importlib.machinery import ModuleSpec
from unittest import mock

import hypothesis
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Set before torch is imported. Models are tiny: threads of one operation would mostly spin while
# waiting for each other, on cores that concurrent tests use.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts commands in the background with Ctrl-C ignored, and tests send it to processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("any machine", deadline=None)  # no test asserts on time
hypothesis.settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def end_of_job():
    """End the job of one rank that a trainer or a failed command leaves in this process.

    Otherwise the next test of the same worker would start inside it.
    """
    yield
    if "nearlinear.distributed.runtime" in sys.modules:
        sys.modules["nearlinear.distributed.runtime"].shutdown()


@pytest.fixture
def no_torchvision(monkeypatch):
    """Replace modules for images, which litdata and streaming import."""
    for name in (
        "torchvision", "torchvision.transforms", "torchvision.transforms.functional",
        "streaming.vision",
    ):  # fmt: skip
        stub = mock.MagicMock(__spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, stub)


def pytest_collection_modifyitems(items):
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        items[:] = slow_first(items, workers)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; torch finds none here"))


def pytest_collection_finish():
    """Exempt the collected tests and their imports from garbage collection.

    Otherwise each full collection, automatic or by `gc.collect`, visits millions of objects.
    """
    gc.collect()
    gc.freeze()


def slow_first(items: list, workers: int) -> list:
    """Order tests so that each of ``workers`` equal shares begins with slow tests.

    xdist gives each worker a share, in order, and idle workers steal from the ends of other shares.
    Fast tests therefore remain for the end, and no worker is left with a test of a minute. Slow
    tests of one file stay together.
    """
    shares = [[] for _ in range(workers)]
    slow, others = (
        [item for item in items if bool(item.get_closest_marker("slow")) is wanted]
        for wanted in (True, False)
    )
    for number, (_, of_file) in enumerate(itertools.groupby(slow, lambda item: item.path)):
        shares[number % workers] += of_file
    others = iter(others)
    for number, share in enumerate(shares, 1):
        end = len(items) * number // workers - len(items) * (number - 1) // workers
        share += itertools.islice(others, max(0, end - len(share)))
    return [item for share in shares for item in share] + list(others)
