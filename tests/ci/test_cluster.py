"""`ci.emulation.cluster`: isolation, links, ranks and cleanup."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from ci.emulation.cluster import (
    Cluster,
    ClusterError,
    as_completed,
    clean,
    namespaces,
    processors,
    unavailable_reason,
)
from ci.emulation.cluster.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 60  # seconds

needs_cluster = pytest.mark.skipif(
    unavailable_reason() is not None, reason=str(unavailable_reason())
)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def wait_until(condition, event: str):
    """Wait for ``condition()`` to be true and return its value."""
    deadline = time.monotonic() + TIMEOUT
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {TIMEOUT} s: {event}"
        time.sleep(0.02)
    return value


def outputs(cluster: Cluster, command: list[str], ranks_per_node: int = 1, **settings) -> list[str]:
    """Return the output of each rank; all ranks must succeed."""
    popen = {"stdout": subprocess.PIPE, "text": True, **settings}
    ranks = cluster.start(command, ranks_per_node, **popen)
    codes = cluster.wait(ranks, TIMEOUT)
    texts = [rank.stdout.read() for rank in ranks]
    assert codes == [0] * len(ranks), texts
    return texts


def names_of(owner: int) -> list[str]:
    """Return the namespaces named after the owner process."""
    if not namespaces.NETNS.exists():
        return []
    return [path.name for path in namespaces.NETNS.glob(f"nearlinear-{owner}-*")]


def alive(process: int) -> bool:
    return namespaces._started(process) is not None


@pytest.fixture(scope="module")
def cluster():
    with Cluster(nodes=3, rate="200mbit") as cluster:
        yield cluster


# Unsuitable machines


@pytest.fixture
def machine(monkeypatch):
    """Simulate a machine that can run a cluster; tests remove a requirement."""
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces, "command", lambda words: None)
    return monkeypatch


def test_suitable_machine_has_no_reason(machine):
    assert unavailable_reason.__wrapped__() is None


def test_missing_tools_are_named_with_their_packages(machine):
    machine.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else tool)
    reason = unavailable_reason.__wrapped__()
    assert "needs tc," in reason and "apt install iproute2" in reason


def test_missing_root_suggests_sudo(machine):
    machine.setattr(os, "geteuid", lambda: 1000)
    assert (
        "needs root" in unavailable_reason.__wrapped__()
        and "sudo" in unavailable_reason.__wrapped__()
    )


def test_refusing_container_suggests_privileged(machine):
    def refuse(words):
        raise ClusterError("unshare: unshare failed: Operation not permitted.")

    machine.setattr(namespaces, "command", refuse)
    reason = unavailable_reason.__wrapped__()
    assert "Operation not permitted" in reason and "--privileged" in reason


def test_command_prints_why_it_cannot_run(monkeypatch, capsys):
    monkeypatch.setattr("ci.emulation.cluster.nodes.unavailable_reason", lambda: "It needs root.")
    assert main(["--nodes", "2", "--", "true"]) == 2
    assert capsys.readouterr().err == "It needs root.\n"


@pytest.mark.parametrize(
    "request_", [[], ["--nodes", "2"], ["--clean", "--", "true"], ["--ranks", "0", "--", "true"]]
)
def test_invalid_requests_are_rejected(request_, capsys):
    with pytest.raises(SystemExit) as refusal:
        main(request_)
    assert refusal.value.code == 2
    assert "-- COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("nodes", [0, -1, 251])
def test_number_of_nodes_is_bounded(nodes):
    with pytest.raises(ValueError, match=f"nodes={nodes}: .* 1 to 250"):
        Cluster(nodes)


# Nodes


@needs_cluster
def test_ranks_have_the_environment_of_torchrun(cluster, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    show = python("import json, os; print(json.dumps(dict(os.environ)))")
    texts = outputs(cluster, show, ranks_per_node=2, env={"MINE": "1"})
    seen = [json.loads(text) for text in texts]
    assert len(seen) == 6
    for rank, env in enumerate(seen):
        assert env["RANK"] == str(rank) and env["WORLD_SIZE"] == "6"
        assert env["LOCAL_RANK"] == str(rank % 2) and env["LOCAL_WORLD_SIZE"] == "2"
        assert env["GROUP_RANK"] == str(rank // 2) and env["GROUP_WORLD_SIZE"] == "3"
        assert env["MASTER_ADDR"] == cluster.address(0) == "10.77.0.1"
        assert env["GLOO_SOCKET_IFNAME"] == "eth0"
        assert env["OMP_NUM_THREADS"] == "1" and env["MINE"] == "1"
        assert env["PATH"] == os.environ["PATH"]
    assert len({env["MASTER_PORT"] for env in seen}) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    later = json.loads(outputs(cluster, show)[0])
    assert later["OMP_NUM_THREADS"] == "3"
    assert later["MASTER_PORT"] != seen[0]["MASTER_PORT"], "two jobs at once would collide"


@needs_cluster
def test_rank_is_the_command_itself_in_the_callers_folder(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    show = python("import os; print(os.getpid(), os.getpgid(0), os.getcwd())")
    ranks = cluster.start(show, 2, stdout=subprocess.PIPE, text=True)
    cluster.wait(ranks, TIMEOUT)
    for number, rank in enumerate(ranks):
        assert (rank.rank, rank.node) == (number, number // 2)
        assert rank.stdout.read() == f"{rank.pid} {rank.pid} {tmp_path}\n", (
            "own process group: unaffected by Ctrl-C"
        )
    assert outputs(cluster, ["pwd"], cwd="/usr") == ["/usr\n"] * 3


@needs_cluster
def test_node_names_resolve_and_nodes_have_one_nic(cluster):
    code = """
        import json, os, socket
        names = ["node0", "node1", "node2", "localhost", socket.gethostname()]
        addresses = [socket.gethostbyname(name) for name in names]
        nics = [name for _, name in socket.if_nameindex()]
        shown = os.listdir("/sys/class/net")
        print(json.dumps([os.uname().nodename, addresses, nics, shown]))
    """
    for node, text in enumerate(outputs(cluster, python(code))):
        hostname, addresses, nics, shown = json.loads(text)
        assert hostname == f"node{node}"
        own = cluster.address(node)
        assert addresses == ["10.77.0.1", "10.77.0.2", "10.77.0.3", "127.0.0.1", own]
        assert sorted(nics) == sorted(shown) == ["eth0", "lo"]


@needs_cluster
def test_memory_and_local_sockets_are_shared_within_a_node_only(cluster, tmp_path):
    server = """
        import pathlib, socket, sys, time
        abstract = socket.socket(socket.AF_UNIX); abstract.bind("\\0nearlinear-test")
        abstract.listen()
        loopback = socket.create_server(("127.0.0.1", 4000))
        pathlib.Path("/dev/shm/segment").touch()
        pathlib.Path(sys.argv[1], "ready").touch()
        time.sleep(1000)
    """
    client = """
        import os, pathlib, socket, sys, time
        def connects(family, address):
            try:
                socket.socket(family).connect(address)
                return True
            except OSError:
                return False
        while not pathlib.Path(sys.argv[1], "ready").exists():
            time.sleep(0.02)
        print(connects(socket.AF_UNIX, "\\0nearlinear-test"),
              connects(socket.AF_INET, ("127.0.0.1", 4000)), os.listdir("/dev/shm"))
    """
    for name, code in {"server": server, "client": client}.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
    choose = f"[ $RANK = 0 ] && role=server || role=client; exec {sys.executable} $0/$role.py $0"
    ranks = cluster.start(["sh", "-c", choose, str(tmp_path)], 2, stdout=subprocess.PIPE, text=True)
    assert cluster.wait(ranks[1:], TIMEOUT) == [0] * 5
    ranks[0].kill()
    assert cluster.wait(ranks, TIMEOUT)[0] == -signal.SIGKILL
    seen = [rank.stdout.read().strip() for rank in ranks[1:]]
    assert seen == ["True True ['segment']"] + ["False False []"] * 4
    assert not Path("/dev/shm/segment").exists(), "the machine's /dev/shm is separate"


@needs_cluster
@pytest.mark.parametrize("kind", ["net", "mnt", "uts", "ipc"])
def test_ranks_of_a_node_share_its_namespaces(cluster, kind):
    found = outputs(cluster, ["readlink", f"/proc/self/ns/{kind}"], ranks_per_node=2)
    assert found[0::2] == found[1::2]
    assert len({*found, os.readlink(f"/proc/self/ns/{kind}") + "\n"}) == 4


@needs_cluster
@pytest.mark.skipif(bool(processors.unavailable_reason()), reason="no cgroup can be made")
def test_nodes_have_their_share_of_the_processors(tmp_path):
    """A busy rank, started or forked into its node, gets no more than a quarter of a processor."""
    code = """
        import os, sys, time
        from ci.emulation.cluster import processors
        if sys.argv[1:]:
            processors.join(int(sys.argv[1]))
        begin, used = time.monotonic(), time.process_time()
        while time.monotonic() < begin + 1:
            pass
        print(round((time.process_time() - used) / (time.monotonic() - begin), 2))
    """
    with Cluster(nodes=1, cores=0.25) as cluster:
        (folder,) = cluster._groups
        (started,) = outputs(cluster, python(code))
        joined = subprocess.run(
            [*python(code), str(cluster.holder(0))], capture_output=True, text=True, check=True
        ).stdout
        assert float(started) < 0.4 and float(joined) < 0.4
    assert not folder.exists()


@needs_cluster
def test_two_clusters_coexist(cluster):
    with Cluster(nodes=1) as other:
        assert outputs(other, ["uname", "-n"]) == ["node0\n"]
        assert not set(other._names) & set(cluster._names)
    assert outputs(cluster, ["uname", "-n"]) == ["node0\n", "node1\n", "node2\n"]


@needs_cluster
@pytest.mark.slow
def test_gloo_runs_on_the_cluster(cluster):
    pytest.importorskip("torch")
    code = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.arange(1000.0) + dist.get_rank()
        dist.all_reduce(x)
        n = dist.get_world_size()
        assert torch.equal(x, n * torch.arange(1000.0) + n * (n - 1) / 2)
        dist.barrier()
        dist.destroy_process_group()
        print(n)
    """
    with Cluster(nodes=2, rate="200mbit") as pair:
        before = pair.counters(1)
        assert outputs(pair, python(code), 2) == ["4\n"] * 4
        assert (pair.counters(1) - before).tx_bytes > 4000


# Links

SEND = """
    import os, socket, sys, time
    rank, port, size = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"]), int(sys.argv[1])
    if rank == 1:
        with socket.create_server(("node1", port)) as server:
            connection, _ = server.accept()
            got = 0
            while chunk := connection.recv(1 << 16):
                got += len(chunk)
            connection.sendall(b"!")
            assert got == size
    if rank == 0:
        while True:
            try:
                connection = socket.create_connection(("node1", port))
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
        connection.sendall(bytes(size))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b"!"
"""


def queue(cluster: Cluster, node: int, at_switch: bool = False) -> dict:
    """Return tc's description of the queue at a node's NIC, or at its switch port."""
    name = cluster._switch if at_switch else cluster._names[node]
    device = f"port{node}" if at_switch else "eth0"
    words = ["tc", "-netns", name, "-statistics", "-json", "qdisc", "show", "dev", device]
    (entry,) = json.loads(subprocess.check_output(words))
    return entry


@needs_cluster
def test_counters_equal_the_bytes_sent(cluster):
    size = 4_000_000
    before = [cluster.counters(node) for node in range(3)]
    outputs(cluster, [*python(SEND), str(size)])
    sent, received, idle = (cluster.counters(n) - before[n] for n in range(3))
    assert size < sent.tx_bytes < size * 1514 / 1448 + 20_000  # headers of at most every segment
    assert sent.tx_bytes == pytest.approx(received.rx_bytes, abs=2000)
    assert sent.tx_packets == pytest.approx(received.rx_packets, abs=20)
    assert sent.rx_bytes == pytest.approx(received.tx_bytes, abs=2000)
    assert received.tx_bytes < size / 20  # acknowledgements
    assert idle.tx_bytes == 0 and idle.rx_bytes < 500  # one or two ARP broadcasts
    assert size / 32768 < sent.tx_packets < 2 * size / 1448


@needs_cluster
def test_idle_cluster_has_no_traffic():
    with Cluster(nodes=2) as fresh:
        outputs(fresh, ["sleep", "0.5"])
        for node in range(2):
            counters = fresh.counters(node)
            assert (counters.tx_bytes, counters.rx_bytes) == (0, 0)


@needs_cluster
def test_rate_limits_both_directions_of_every_link(cluster):
    for node in range(3):
        for at_switch in (False, True):
            entry = queue(cluster, node, at_switch)
            assert entry["kind"] == "tbf" and entry["root"]
            assert entry["options"]["rate"] == 200e6 / 8
            assert entry["options"]["burst"] == pytest.approx(65536, rel=0.01)


@needs_cluster
@pytest.mark.parametrize("limited", [0, 1])
def test_traffic_is_limited_by_sender_and_receiver(limited):
    size = 2_000_000
    with Cluster(nodes=2) as cluster:
        cluster.set_rate("100mbit", node=limited)
        outputs(cluster, [*python(SEND), str(size)])
        other = 1 - limited
        assert {queue(cluster, other, s)["kind"] for s in (False, True)} == {"noqueue"}
        entry = queue(cluster, limited, at_switch=limited == 1)
        assert entry["kind"] == "tbf" and entry["bytes"] > size
        assert entry["overlimits"] > 10, "packets had to wait for the rate"


@needs_cluster
def test_rate_can_be_changed_and_removed():
    with Cluster(nodes=2, rate="1gbit") as cluster:
        cluster.set_rate("50mbit", node=1)
        assert queue(cluster, 0)["options"]["rate"] == 1e9 / 8
        assert queue(cluster, 1)["options"]["rate"] == 50e6 / 8
        cluster.set_rate(None)
        assert {queue(cluster, n, s)["kind"] for n in (0, 1) for s in (False, True)} == {"noqueue"}
        cluster.set_rate("2gbit")
        assert queue(cluster, 1, at_switch=True)["options"]["rate"] == 2e9 / 8
        with pytest.raises(ClusterError, match="fast"):
            cluster.set_rate("fast")


@needs_cluster
def test_large_packets_fit_the_bucket():
    """Larger packets would be split by tbf, slowly and out of order."""
    size = 4_000_000
    with Cluster(nodes=2, rate="1gbit") as cluster:
        outputs(cluster, [*python(SEND), str(size)])
        counted = cluster.counters(0).tx_bytes  # headers once per large packet
        charged = queue(cluster, 0)["bytes"]  # headers once per segment
        packets = cluster.counters(0).tx_packets
        assert charged > counted + 30 * size / 1448
        assert packets < size / 1448 / 2


@needs_cluster
def test_disconnected_node_has_no_traffic_until_reconnected(cluster):
    chatter = """
        import os, socket, time
        if os.environ["RANK"] == "0":
            channel = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            while True:
                for name in ["node1", "node2"]:
                    channel.sendto(bytes(100), (name, 5000))
                time.sleep(0.005)
        time.sleep(1000)
    """
    ranks = cluster.start(python(chatter))

    def more_at(node: int, packets: int = 20):
        start = cluster.counters(node).rx_packets
        wait_until(
            lambda: cluster.counters(node).rx_packets >= start + packets, f"node{node} receives"
        )

    more_at(1)
    cluster.link_down(1)
    before = cluster.counters(1)
    more_at(2)  # other nodes continue
    assert (cluster.counters(1) - before).rx_packets == 0
    assert ranks[0].poll() is None, "sockets see no error"
    cluster.link_up(1)
    more_at(1)
    for rank in ranks:
        rank.kill()
    cluster.wait(ranks, TIMEOUT)


@needs_cluster
@pytest.mark.parametrize("call", ["address", "counters", "link_down", "link_up"])
@pytest.mark.parametrize("node", [-1, 3])
def test_unknown_node_is_rejected(cluster, call, node):
    with pytest.raises(ValueError, match=f"node {node} does not exist.* 0 to 2"):
        getattr(cluster, call)(node)


# Ranks


@needs_cluster
def test_wait_timeout_names_the_running_ranks(cluster):
    first, second, third = ranks = cluster.start(["sh", "-c", "exec sleep ${RANK}000"])
    first.wait(TIMEOUT)  # sleep 0000
    second.stop()
    third.kill()
    assert next(as_completed([second, third], TIMEOUT)) is third
    with pytest.raises(TimeoutError, match=r"after 0\.1 s: node1 rank1\."):
        cluster.wait(ranks, timeout=0.1)
    second.send_signal(signal.SIGTERM)
    assert list(as_completed([second], timeout=0.1)) == [], "a frozen process handles no signal"
    second.resume()
    assert cluster.wait(ranks, TIMEOUT) == [0, -signal.SIGTERM, -signal.SIGKILL]


@needs_cluster
def test_ranks_outlive_the_thread_that_started_them(cluster):
    ranks = []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    thread = threading.Thread(target=lambda: ranks.extend(cluster.start(["cat"], **pipes)))
    thread.start()
    thread.join()
    assert [rank.communicate("hello", TIMEOUT)[0] for rank in ranks] == ["hello"] * 3


@needs_cluster
def test_streams_can_depend_on_the_rank(cluster, tmp_path):
    with contextlib.ExitStack() as files:
        opened = [files.enter_context((tmp_path / f"{n}.log").open("w")) for n in range(3)]
        ranks = cluster.start(["sh", "-c", "echo $RANK; echo no >&2"], stdout=opened.__getitem__,
                              stderr=lambda rank: subprocess.STDOUT if rank else None)  # fmt: skip
        assert cluster.wait(ranks, TIMEOUT) == [0, 0, 0]
    assert [(tmp_path / f"{n}.log").read_text() for n in range(3)] == ["0\n", "1\nno\n", "2\nno\n"]


# Cleanup

OWNER = """
    import signal, subprocess, time
    from ci.emulation.cluster import Cluster
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also if started by nohup or &
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with Cluster(nodes=2, rate="1gbit") as cluster:
        # A rank with a child, which the parent-death signal does not reach.
        ranks = cluster.start(["sh", "-c", "sleep 1000 & echo $!; wait"],
                              stdout=subprocess.PIPE, text=True)
        children = [int(rank.stdout.readline()) for rank in ranks]
        print(*[rank.pid for rank in ranks], *children, flush=True)
        {last}
"""


@contextlib.contextmanager
def owner(last: str = "time.sleep(1000)"):
    """Start a cluster owner; yield its process, and the ids of its ranks and their children."""
    code = python(textwrap.dedent(OWNER).format(last=last))
    process = subprocess.Popen(code, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield process, [int(word) for word in process.stdout.readline().split()]
        finally:
            process.kill()


@needs_cluster
@pytest.mark.parametrize(
    "number, last, code",
    [
        (None, "pass", 0),
        (None, "raise ValueError", 1),
        (signal.SIGTERM, "time.sleep(1000)", 143),
        (signal.SIGHUP, "time.sleep(1000)", 129),
        (signal.SIGINT, "time.sleep(1000)", -2),
    ],
)
def test_owner_that_exits_or_is_terminated_leaves_nothing(number, last, code):
    with owner(last) as (process, processes):
        assert len(processes) == 4
        if number:
            assert len(names_of(process.pid)) == 3
            process.send_signal(number)
        assert process.wait(TIMEOUT) == code
        assert names_of(process.pid) == []
        assert not any(alive(one) for one in processes)


@needs_cluster
def test_signals_during_removal_are_deferred(monkeypatch):
    remove = namespaces.remove

    def interrupted(names):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        remove(names)

    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        before = names_of(os.getpid())
        with pytest.raises(SystemExit) as end:
            with Cluster(nodes=1):
                monkeypatch.setattr(namespaces, "remove", interrupted)
        assert end.value.code == 128 + signal.SIGTERM
        assert names_of(os.getpid()) == before
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, handler)


@needs_cluster
def test_next_start_removes_leftovers_of_a_killed_owner(cluster):
    with owner() as (process, processes):
        ranks, children = processes[:2], processes[2:]
        assert len(names_of(process.pid)) == 3
        assert all(alive(child) for child in children)
        process.kill()
        wait_until(lambda: not alive(process.pid), "the owner is dead")  # a zombie until reaped
        wait_until(lambda: not any(alive(rank) for rank in ranks), "ranks end with their owner")
        with Cluster(nodes=1):
            assert names_of(process.pid) == []
            assert not any(alive(child) for child in children)
    assert outputs(cluster, ["uname", "-n"])[1] == "node1\n", "live clusters are unaffected"


@needs_cluster
def test_clean_distinguishes_owners_with_the_same_process_id(cluster):
    mine, started = os.getpid(), namespaces._started(os.getpid())
    reused = f"nearlinear-{mine}-{started - 1}-0-node0"  # of an earlier process with this id
    foreign = f"nearlinear-test-{mine}"
    for name in (reused, foreign):
        subprocess.check_call(["ip", "netns", "add", name])
    try:
        clean()
        left = set(os.listdir(namespaces.NETNS))
        assert reused not in left
        assert {foreign, *cluster._names, cluster._switch} <= left
    finally:
        subprocess.check_call(["ip", "netns", "delete", foreign])


@needs_cluster
def test_concurrent_cleanup_succeeds(monkeypatch):
    names = [f"nearlinear-test-{os.getpid()}-{n}" for n in range(3)]
    for name in names:
        subprocess.check_call(["ip", "netns", "add", name])
    command = namespaces.command

    def overtaken(words, text=""):
        subprocess.check_call(["ip", "netns", "delete", names[0]])
        command(words, text)

    monkeypatch.setattr(namespaces, "command", overtaken)
    namespaces.remove(names)
    assert not set(names) & set(os.listdir(namespaces.NETNS))


@pytest.mark.parametrize("removed, shown", [(["a", "b"], "a\nb\n"), ([], "Nothing to remove.\n")])
def test_clean_prints_the_removed_namespaces(removed, shown, monkeypatch, capsys):
    monkeypatch.setattr("ci.emulation.cluster.nodes.unavailable_reason", lambda: None)
    monkeypatch.setattr("ci.emulation.cluster.__main__.clean", lambda: removed)
    assert main(["--clean"]) == 0
    assert capsys.readouterr().out == shown


@needs_cluster
def test_failed_start_leaves_nothing():
    before = names_of(os.getpid())
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(ClusterError, match="tc: .*rate"):
            with Cluster(nodes=2, rate="fast"):
                pass
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert names_of(os.getpid()) == before


@needs_cluster
def test_no_descriptor_or_process_is_leaked():
    def own_resources():
        parents = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # the process has ended
                parents.append(int(stat.read_text().rpartition(")")[2].split()[1]))
        return sorted(os.listdir("/proc/self/fd")), parents.count(os.getpid())

    with Cluster(nodes=1):
        pass  # resources opened once for all clusters
    before = own_resources()
    with Cluster(nodes=2) as cluster:
        ranks = cluster.start(["sh", "-c", "exec sleep ${RANK}000"], 2)
        next(as_completed(ranks))
        with pytest.raises(TimeoutError):
            cluster.wait(ranks, timeout=0.01)
    assert own_resources() == before


@needs_cluster
def test_forked_child_does_not_close_the_cluster(cluster):
    child = os.fork()
    if child == 0:
        try:
            cluster.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert outputs(cluster, ["uname", "-n"])[2] == "node2\n"


# Command line


@needs_cluster
def test_command_shows_the_output_of_rank_0():
    command = [
        "-m",
        "ci.emulation.cluster",
        "--nodes",
        "2",
        "--ranks",
        "2",
        "--rate",
        "1gbit",
        "--",
    ]
    done = subprocess.run(
        [sys.executable, *command, "sh", "-c", "echo rank $RANK; echo note $RANK >&2"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "rank 0\n", "note 0\n")


@needs_cluster
def test_prefix_shows_all_ranks_line_by_line(capfd):
    show = "echo one; echo two >&2; printf three"
    assert main(["--nodes", "2", "--ranks", "2", "--prefix", "--", "sh", "-c", show]) == 0
    lines = capfd.readouterr().out.splitlines()
    for place in ["node0 rank0", "node0 rank1", "node1 rank2", "node1 rank3"]:
        own = [line for line in lines if line.startswith(f"[{place}]")]
        assert own == [f"[{place}] one", f"[{place}] two", f"[{place}] three"]
    assert len(lines) == 12


@needs_cluster
def test_first_failure_is_reported_and_ends_the_other_ranks(capfd, monkeypatch):
    monkeypatch.setattr("ci.emulation.cluster.__main__.GRACE", 0.2)
    script = """
        case $RANK in
            0) exec sleep 1000 ;;
            1) exit 0 ;;
            2) seq 100; echo disk is full >&2; exit 7 ;;
        esac
    """
    assert main(["--nodes", "3", "--", "sh", "-c", script]) == 7
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == "[node2 rank2] was the first to fail: exit code 7"
    assert lines[1:-1] == [f"    {n}" for n in range(82, 101)] + ["    disk is full"]
    assert lines[-1].startswith("Killed") and lines[-1].endswith(": node0 rank0")


@needs_cluster
def test_killed_rank_gives_the_exit_code_of_a_shell(capfd):
    assert main(["--nodes", "1", "--", "sh", "-c", "kill -KILL $$"]) == 137
    assert "killed by signal 9" in capfd.readouterr().err
    assert main(["--nodes", "1", "--", "no-such-command"]) == 127


@needs_cluster
def test_closed_output_ends_the_run():
    command = [sys.executable, "-m", "ci.emulation.cluster", "--prefix", "--", "yes"]
    with subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(TIMEOUT) == 128 + signal.SIGPIPE
        assert "Traceback" not in process.stderr.read()
