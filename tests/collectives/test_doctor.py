"""The doctor reports the state of this machine, and a remedy for each defect."""

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
from nearlinear_collectives.doctor import Finding, Report, host, network
from nearlinear_collectives.doctor.finding import BROKEN, OFF, OK, SLOW, STATE_MEANINGS

COMMAND = [sys.executable, "-m", "nearlinear_collectives.doctor"]


def run_doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "NEARLINEAR_COLLECTIVES_GLUE": "python", **environment}
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


def test_this_machine_has_no_broken_finding():
    done = run_doctor("--json")
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    report = json.loads(done.stdout)
    state = {finding["name"]: finding["state"] for finding in report["findings"]}
    assert report["works"] and set(state.values()) <= set(STATE_MEANINGS) - {BROKEN}
    assert state["engine"] == state["shared memory"] == OK
    assert torch.cuda.is_available() or state["CUDA"] == OFF


def test_missing_engine_is_broken_and_gives_exit_status_1():
    done = run_doctor(NEARLINEAR_COLLECTIVES_ENGINE="/nowhere/engine.so")
    assert done.returncode == 1
    assert "broken  engine" in done.stdout and "/nowhere/engine.so" in done.stdout
    assert "-> " in done.stdout and STATE_MEANINGS[BROKEN] in done.stdout


def test_doctor_returns_a_report(monkeypatch):
    monkeypatch.setenv("NEARLINEAR_COLLECTIVES_GLUE", "python")
    report = nearlinear_collectives.doctor()
    assert isinstance(report, Report) and report.works
    assert report["glue"].state == SLOW and "unset" in report["glue"].remedy
    assert repr(report) == str(report) and torch.__version__ in str(report)


def test_report_with_a_broken_finding_does_not_work():
    sound, broken = Finding("a", OK, "fine"), Finding("b", BROKEN, "not so", "repair it")
    assert Report("", (sound,)).works and not Report("", (sound, broken)).works
    assert "-> repair it" in str(broken)


@pytest.mark.parametrize(
    "message, script",
    [
        ("No such file", "import os; os.open('/proc/0/fd/0', os.O_RDWR)"),
        ("does not hold", host.NEIGHBOUR.replace('b"hello"', 'b"other"')),
        ("does not hold", host.NEIGHBOUR.replace('b"world"', 'b"other"')),
        ("No such file", "print(12345, flush=True); input()"),
        ("the second one ended", ""),
    ],
)
def test_processes_that_cannot_share_memory_are_broken(monkeypatch, message, script):
    monkeypatch.setattr(host, "NEIGHBOUR", script)
    found = host.check_shared_memory()
    assert found.state == BROKEN and message in found.message and "one user" in found.remedy


def test_shared_memory_check_leaves_no_process_or_descriptor():
    def open_now() -> tuple[list[str], list[psutil.Process]]:
        return sorted(os.listdir("/proc/self/fd")), psutil.Process().children()

    host.check_shared_memory()
    before = open_now()
    assert host.check_shared_memory().state == OK
    assert open_now() == before


def test_huge_pages_agree_with_the_kernel_setting():
    setting = host.SHMEM_ENABLED.read_text() if host.SHMEM_ENABLED.exists() else "[never]"
    if "[never]" in setting or "[deny]" in setting:
        assert host.huge_page_kilobytes(8 << 20) == 0
        assert "echo advise" in host.check_huge_pages().remedy
    elif "[always]" in setting or "[force]" in setting:
        assert host.huge_page_kilobytes(8 << 20) > 0


def test_cores_are_slow_if_ranks_share_them(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4))
    monkeypatch.setattr(host, "cpu_quota", lambda: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host.check_cores().state == OK
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert host.check_cores().state == SLOW and "at most 4 ranks" in host.check_cores().remedy
    monkeypatch.setattr(host, "cpu_quota", lambda: 1.5)
    assert "quota is 1.5" in host.check_cores().message


def test_unusable_interface_is_reported_with_remedy(monkeypatch):
    monkeypatch.setenv("NEARLINEAR_COLLECTIVES_INTERFACE", "lo")
    found = network.check_interface()
    assert (
        found.state == OFF
        and "lo" in found.message
        and "NEARLINEAR_COLLECTIVES_INTERFACE" in found.remedy
    )
    monkeypatch.setenv("NEARLINEAR_COLLECTIVES_INTERFACE", "nosuch0")
    assert "nosuch0" in network.check_interface().message


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
def test_efa_adapters_need_their_software_and_setting(
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

    monkeypatch.setattr(network, "describe_transport", transport)
    found = network.check_libfabric()
    assert found.state == state and remedy in found.remedy and bool(remedy) == bool(found.remedy)


@pytest.mark.parametrize(
    "address, state", [("127.0.1.1", OFF), (None, OFF), ("10.0.0.7", OK), ("fd00::7", OK)]
)
def test_gloo_needs_a_resolvable_host_name(monkeypatch, address, state):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(network, "MAX_LOOKUP_SECONDS", float("inf"))
    monkeypatch.setattr(network, "own_address", lambda: address and ipaddress.ip_address(address))
    found = network.check_gloo()
    assert found.state == state and (state == OK or "GLOO_SOCKET_IFNAME" in found.remedy)
    monkeypatch.setattr(network, "MAX_LOOKUP_SECONDS", -1.0)
    assert network.check_gloo().state == SLOW


def test_torchcomms_that_bypasses_the_backend_is_broken(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "1")
    assert not list(host.check_torchcomms()), "the variable alone has no effect"
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: name)
    [found] = host.check_torchcomms()
    assert found.state == BROKEN and "unset" in found.remedy
    monkeypatch.setenv("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0")
    assert not list(host.check_torchcomms())


GOOD = {"version": (2, 30, 6), "driver": (13, 0), "unreachable": None, "environment": {}}


@pytest.mark.parametrize(
    "change, message, remedy",
    [
        ({}, "", ""),
        ({"version": (2, 28, 0)}, "", ""),
        ({"driver": (12, 5)}, "", ""),
        ({"environment": {"NCCL_CTA_POLICY": "2"}}, "", ""),
        ({"version": (2, 27, 7)}, "NCCL 2.27.7", "2.28.0"),
        ({"driver": (12, 4)}, "CUDA 12.4 only", "12.5"),
        ({"unreachable": (0, 3)}, "GPUs 0 and 3", "peer access"),
        ({"environment": {"NCCL_CTA_POLICY": "1"}}, "NCCL_CTA_POLICY=1", "=2"),
        ({"environment": {"NCCL_P2P_DISABLE": "1"}}, "NCCL_P2P_DISABLE", "unset"),
    ],
)
def test_nccl_copy_engine_obstacles_have_remedies(monkeypatch, change, message, remedy):
    policies = type("ProcessGroupNCCL", (), {"NCCL_CTA_POLICY_ZERO": 2})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", policies, raising=False)
    monkeypatch.setattr(network, "has_symmetric_memory", lambda: True)
    found = list(network.zero_cta_obstacles(**{**GOOD, **change}))
    assert len(found) == (1 if message else 0)
    assert all(message in said and remedy in advice for said, advice in found)


def test_torch_without_nccl_policy_or_symmetric_memory_is_reported(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("ProcessGroupNCCL", (), {}), raising=False)
    monkeypatch.setattr(network, "has_symmetric_memory", lambda: False)
    policy, memory = network.zero_cta_obstacles(**GOOD)
    assert "NCCL_CTA_POLICY=2" in policy[1] and "symmetric memory" in memory[0]
    environment = {"NCCL_CTA_POLICY": "2"}
    assert [
        message for message, _ in network.zero_cta_obstacles(**{**GOOD, "environment": environment})
    ] == [memory[0]]
