"""Groups with forks, threads and launchers."""

import os
import re
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from tests.collectives.ranks import BACKEND

CPU = torch.device("cpu")


def total() -> float:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return tensor[0].item()


def fork_and_touch(rank):
    """A forked child that uses its parent's group gets an error; the parent is unaffected."""
    before, tensor = total(), torch.ones(2)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(15)
        answer = "no error"
        try:
            dist.all_reduce(tensor)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    asynchronous = dist.all_reduce(tensor, async_op=True)
    asynchronous.wait()
    return before, answer, status, total(), tensor.tolist()


def test_forked_child_cannot_use_its_parents_group(pool):
    if BACKEND == "gloo":
        pytest.skip("gloo hangs")
    for before, answer, status, after, tensor in pool.run(fork_and_touch, ranks=2, limit=30):
        assert before == after == 2.0 and status == 0 and tensor == [2.0, 2.0]
        assert "fork" in answer and "no error" not in answer


def start_anew_in_a_child(rank):
    """The child leaves the inherited group and creates a new one with its own pool."""
    dist.all_reduce(torch.ones(200_000), async_op=True).wait()  # starts a thread of the engine
    allocate = dist.group.WORLD._get_backend(CPU).allocate_tensor
    old = allocate(300_000, dtype=torch.float32, device=CPU).fill_(1)
    child = os.fork()
    if child == 0:
        signal.alarm(15)
        code = 1
        try:
            dist.destroy_process_group()
            dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
            allocate = dist.group.WORLD._get_backend(CPU).allocate_tensor
            mine = allocate(300_000, dtype=torch.float32, device=CPU).fill_(2)
            dist.all_reduce(mine, async_op=True).wait()
            code = 0 if total() == 1.0 and (mine == 2).all() else 2
        finally:
            os._exit(code)
    new = allocate(300_000, dtype=torch.float32, device=CPU).fill_(3)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), old.unique().tolist(), new.unique().tolist(), total()


def test_forked_child_can_create_a_new_group(pool):
    if BACKEND == "gloo":
        pytest.skip("gloo's threads do not survive a fork")
    for found in pool.run(start_anew_in_a_child, ranks=2, limit=30):
        assert found == (0, [1.0], [3.0], 2.0)


def two_threads(rank):
    groups, sums = [dist.new_group(), dist.new_group()], [0.0, 0.0]

    def work(which: int) -> None:
        for step in range(100):
            tensor = torch.full((1 + 1500 * (step % 5),), 1.0 + which)
            dist.all_reduce(tensor, group=groups[which])
            sums[which] += tensor[-1].item()

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sums


def test_two_threads_can_use_two_groups(pool):
    assert pool.run(two_threads, ranks=3, limit=60) == [[300.0, 600.0]] * 3


SCRIPT = """
import sys, torch, torch.distributed as dist
{imports}
dist.init_process_group("{backend}")
tensor = torch.ones(3)
dist.all_reduce(tensor)
work = dist.all_reduce(tensor, async_op=True)
work.wait()
assert tensor.tolist() == [float(dist.get_world_size() ** 2)] * 3
sys.stdout.write("saw " + str(tensor.tolist()) + "\\n")
{leave}
"""


@pytest.mark.slow
@pytest.mark.parametrize("leave", ["dist.destroy_process_group()", "", "sys.exit(3)"])
def test_script_under_torchrun(tmp_path, compiled, leave):
    """Cover new interpreters, the launcher's store, and exits with destroy, without, in error."""
    imports = "import nearlinear_collectives" if BACKEND != "gloo" else ""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(imports=imports, backend=BACKEND, leave=leave))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    ended = subprocess.run(
        [*command, str(script)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.count("saw [4.0, 4.0, 4.0]\n") == 2, ended.stderr[-3000:]
    assert (ended.returncode == 0) == ("exit" not in leave), ended.stderr[-3000:]
    crashed = re.search(r"SIG(SEGV|ABRT|BUS)|terminate called", ended.stderr)
    assert not crashed, ended.stderr[-3000:]
