"""The doctor tells the truth about this machine, and the remedy where one lacks something."""

import ipaddress
import json
import os
import subprocess
import sys

import psutil
import pytest
import torch
import torch.distributed as dist

import nearlinear_collectives
from nearlinear_collectives import backend
from nearlinear_collectives.doctor import machine, nccl, network, software
from nearlinear_collectives.doctor.report import BROKEN, MEANING, OFF, OK, SLOW, Finding, Report

COMMAND = [sys.executable, "-m", "nearlinear_collectives.doctor"]


def run_doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "NEARLINEAR_COLLECTIVES_GLUE": "python", **environment}
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


def test_this_machine_can_do_what_the_other_tests_do():
    done = run_doctor("--json")
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    report = json.loads(done.stdout)
    state = {finding["name"]: finding["state"] for finding in report["findings"]}
    assert report["works"] and set(state.values()) <= set(MEANING) - {BROKEN}
    assert state["engine"] == state["shared memory"] == OK
    assert torch.cuda.is_available() or state["CUDA"] == OFF


def test_a_machine_without_engine_is_told_so_and_fails():
    done = run_doctor(NEARLINEAR_COLLECTIVES_ENGINE="/nowhere/engine.so")
    assert done.returncode == 1
    assert "broken  engine" in done.stdout and "/nowhere/engine.so" in done.stdout
    assert "-> " in done.stdout and MEANING[BROKEN] in done.stdout


def test_the_public_function_gives_the_report(monkeypatch):
    monkeypatch.setenv("NEARLINEAR_COLLECTIVES_GLUE", "python")
    report = nearlinear_collectives.doctor()
    assert isinstance(report, Report) and report.works
    assert report["glue"].state == SLOW and "unset" in report["glue"].remedy
    assert repr(report) == str(report) and torch.__version__ in str(report)


def test_a_report_with_something_broken_does_not_work():
    sound, broken = Finding("a", OK, "fine"), Finding("b", BROKEN, "not so", "mend it")
    assert Report("", (sound,)).works and not Report("", (sound, broken)).works
    assert "-> mend it" in str(broken)


@pytest.mark.parametrize(
    "says, script",
    [
        ("No such file", "import os; os.open('/proc/0/fd/0', os.O_RDWR)"),
        ("does not hold", machine.NEIGHBOUR.replace('b"hello"', 'b"other"')),
        ("does not hold", machine.NEIGHBOUR.replace('b"world"', 'b"other"')),
        ("No such file", "print(12345, flush=True); input()"),
        ("the second one ended", ""),
    ],
)
def test_ranks_that_cannot_share_memory(monkeypatch, says, script):
    monkeypatch.setattr(machine, "NEIGHBOUR", script)
    found = machine.shared_memory()
    assert found.state == BROKEN and says in found.says and "one user" in found.remedy


def test_no_process_or_descriptor_is_left_behind():
    def open_now() -> tuple[list[str], list[psutil.Process]]:
        return sorted(os.listdir("/proc/self/fd")), psutil.Process().children()

    machine.shared_memory()
    before = open_now()
    assert machine.shared_memory().state == OK
    assert open_now() == before


def test_huge_pages_are_what_the_kernel_says():
    setting = machine.SHMEM_ENABLED.read_text() if machine.SHMEM_ENABLED.exists() else "[never]"
    if "[never]" in setting or "[deny]" in setting:
        assert machine.huge_kilobytes(8 << 20) == 0
        assert "echo advise" in machine.huge_pages().remedy
    elif "[always]" in setting or "[force]" in setting:
        assert machine.huge_kilobytes(8 << 20) > 0


def test_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4))
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machine.cores().state == OK
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert machine.cores().state == SLOW and "at most 4 ranks" in machine.cores().remedy
    monkeypatch.setattr(machine, "cpu_quota", lambda: 1.5)
    assert "quota is 1.5" in machine.cores().says


def test_the_network_that_is_used(monkeypatch):
    monkeypatch.setenv("NEARLINEAR_COLLECTIVES_INTERFACE", "lo")
    found = network.network()
    assert (
        found.state == OFF
        and "lo" in found.says
        and "NEARLINEAR_COLLECTIVES_INTERFACE" in found.remedy
    )
    monkeypatch.setenv("NEARLINEAR_COLLECTIVES_INTERFACE", "nosuch0")
    assert "nosuch0" in network.network().says


TCP = "libfabric 2.5 (tcp on eth0), window 4 MiB"
EFA = "libfabric 2.5 (efa on rdmap0), window 4 MiB"


@pytest.mark.parametrize(
    "driver, library, setting, state, remedy",
    [
        ("mlx5_core", TCP, None, OK, ""),
        ("mlx5_core", None, None, OFF, ""),
        ("efa", None, None, SLOW, "EFA software"),
        ("efa", TCP, "ofi", SLOW, "EFA software"),
        ("efa", EFA, None, SLOW, "NEARLINEAR_COLLECTIVES_TRANSPORT=ofi"),
        ("efa", EFA, "ofi", OK, ""),
    ],
)
def test_adapters_and_their_software(
    monkeypatch, tmp_path, driver, library, setting, state, remedy
):
    (tmp_path / "drivers" / driver).mkdir(parents=True)
    device = tmp_path / "infiniband" / "rdmap0" / "device"
    device.mkdir(parents=True)
    (device / "driver").symlink_to(tmp_path / "drivers" / driver)
    monkeypatch.setattr(network, "INFINIBAND", tmp_path / "infiniband")
    if setting:
        monkeypatch.setenv("NEARLINEAR_COLLECTIVES_TRANSPORT", setting)

    def transport(name: str) -> str:
        if library is None:
            raise RuntimeError("libfabric cannot be loaded")
        return library

    monkeypatch.setattr(network, "transport", transport)
    found = network.libfabric()
    assert found.state == state and remedy in found.remedy and bool(remedy) == bool(found.remedy)


@pytest.mark.parametrize(
    "address, state", [("127.0.1.1", OFF), (None, OFF), ("10.0.0.7", OK), ("fd00::7", OK)]
)
def test_what_gloo_makes_of_the_machines_name(monkeypatch, address, state):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(network, "LONG", float("inf"))
    monkeypatch.setattr(network, "own_address", lambda: address and ipaddress.ip_address(address))
    found = network.gloo()
    assert found.state == state and (state == OK or "GLOO_SOCKET_IFNAME" in found.remedy)
    monkeypatch.setattr(network, "LONG", -1.0)
    assert network.gloo().state == SLOW


def test_torchcomms_would_bypass_the_backend(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "1")
    assert not list(software.torchcomms()), "the variable alone does nothing"
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: name)
    [found] = software.torchcomms()
    assert found.state == BROKEN and "unset" in found.remedy
    monkeypatch.setenv("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0")
    assert not list(software.torchcomms())


GOOD = {"version": (2, 30, 6), "driver": (13, 0), "refusing": None, "environment": {}}


@pytest.mark.parametrize(
    "change, says, remedy",
    [
        ({}, "", ""),
        ({"version": (2, 28, 0)}, "", ""),
        ({"driver": (12, 5)}, "", ""),
        ({"environment": {"NCCL_CTA_POLICY": "2"}}, "", ""),
        ({"version": (2, 27, 7)}, "NCCL 2.27.7", "2.28.0"),
        ({"driver": (12, 4)}, "CUDA 12.4 only", "12.5"),
        ({"refusing": (0, 3)}, "GPUs 0 and 3", "peer access"),
        ({"environment": {"NCCL_CTA_POLICY": "1"}}, "NCCL_CTA_POLICY=1", "=2"),
        ({"environment": {"NCCL_P2P_DISABLE": "1"}}, "NCCL_P2P_DISABLE", "unset"),
    ],
)
def test_what_keeps_nccl_from_its_copy_engines(monkeypatch, change, says, remedy):
    policies = type("ProcessGroupNCCL", (), {"NCCL_CTA_POLICY_ZERO": 2})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", policies, raising=False)
    monkeypatch.setattr(nccl, "symmetric_memory", lambda: True)
    found = list(nccl.obstacles(**{**GOOD, **change}))
    assert len(found) == (1 if says else 0)
    assert all(says in said and remedy in told for said, told in found)


def test_a_torch_that_cannot_ask_nccl(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("ProcessGroupNCCL", (), {}), raising=False)
    monkeypatch.setattr(nccl, "symmetric_memory", lambda: False)
    policy, memory = nccl.obstacles(**GOOD)
    assert "NCCL_CTA_POLICY=2" in policy[1] and "symmetric memory" in memory[0]
    environment = {"NCCL_CTA_POLICY": "2"}
    assert [says for says, _ in nccl.obstacles(**{**GOOD, "environment": environment})] == [
        memory[0]
    ]
