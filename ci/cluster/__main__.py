"""The command line: run a command as N nodes x M ranks on an emulated cluster, or ``--clean``.

Exit code 0 when every rank ended well, else that of the first rank to fail (128 + the signal that
killed it, as in a shell), 2 for a wrong request or a machine that cannot run a cluster.
"""

import argparse
import collections
import contextlib
import subprocess
import sys
import threading

from ci.cluster import Cluster, Rank, clean, in_order_of_end, status_of

EXAMPLES = """\
examples:
  python -m ci.cluster --nodes 4 --ranks 2 --rate 200mbit -- python train.py --steps 10
  python -m ci.cluster --nodes 2 --prefix -- sh -c 'uname -n; env | grep RANK'
  python -m ci.cluster --clean

Needs root: with sudo, name the Python of your environment, as in sudo .venv/bin/python.
Ranks find what torchrun would tell them in their environment (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, ...), so that torch.distributed.init_process_group() needs no more than a backend."""

LAST_LINES = 20  # shown of a rank that failed
GRACE = 5.0  # seconds the others get, after the first failure, to fail in their own words


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m ci.cluster",
        usage="%(prog)s [options] -- COMMAND [ARGUMENTS]",
        description="Run a command on every rank of an emulated cluster on this machine: "
        "nodes are\nLinux namespaces, each with a NIC, around one switch.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--ranks", type=int, default=1, metavar="M", help="per node (default: 1)")
    parser.add_argument(
        "--rate", help="limit of each NIC, each way: 200mbit, 1gbit, ... (default: no limit)"
    )
    parser.add_argument(
        "--prefix",
        action="store_true",
        help="show the output of all ranks, each line after its [node0 rank1]; without it, "
        "rank 0's, and the last lines of a rank that fails",
    )
    parser.add_argument(
        "--clean", action="store_true", help="remove what killed runs left, and do nothing else"
    )
    split = argv.index("--") if "--" in argv else len(argv)
    args, command = parser.parse_args(argv[:split]), argv[split + 1 :]
    if bool(command) == args.clean:
        parser.error("give either --clean, or a command after --")
    if args.ranks < 1:
        parser.error(f"--ranks {args.ranks}: a node has at least one rank")
    return status_of(lambda: _clean() if args.clean else _run(args, command))


def _clean() -> int:
    print("\n".join(clean()) or "Nothing to remove.")
    return 0


def _run(args, command: list[str]) -> int:
    with Cluster(args.nodes, args.rate) as cluster:
        return run(cluster, args.ranks, command, args.prefix)


def run(cluster: Cluster, ranks_per_node: int, command: list[str], prefix: bool) -> int:
    """Run the command on every rank, show what is to be shown, and return the exit code."""

    def piped(rank: int) -> bool:
        return prefix or rank > 0  # else rank 0 has our own output, be it a terminal or a file

    ranks = cluster.start(
        command,
        ranks_per_node,
        stdout=lambda rank: subprocess.PIPE if piped(rank) else None,
        stderr=lambda rank: subprocess.STDOUT if piped(rank) else None,
        text=True,
        errors="replace",
    )
    followers = {rank: Follower(rank, prefix) for rank in ranks if rank.stdout}
    first = next((rank for rank in in_order_of_end(ranks) if rank.returncode), None)
    if first:
        running = [rank for rank in ranks if rank.returncode is None]
        ended = list(in_order_of_end(running, GRACE))
        report(first, "was the first to fail", followers)
        for rank in ended:
            if rank.returncode:
                report(rank, "failed too", followers)
        if late := [str(rank) for rank in running if rank.returncode is None]:
            print(f"Killed, as still running {GRACE:g} s later: {', '.join(late)}", file=sys.stderr)
    for follower in followers.values():
        if follower.rank.returncode is not None:
            follower.join(timeout=1)  # longer only where a child of the rank holds its output
    if not first:
        return 0
    return first.returncode if first.returncode > 0 else 128 - first.returncode


class Follower(threading.Thread):
    """Reads a rank's output as it comes: keeps the last lines, and shows each where asked to."""

    def __init__(self, rank: Rank, show: bool):
        super().__init__(daemon=True)
        self.rank = rank
        self.show = show
        self.last = collections.deque(maxlen=LAST_LINES)
        self.start()

    def run(self) -> None:
        # A closed output of ours closes the rank's: it must not hang on a reader that is gone.
        with contextlib.suppress(BrokenPipeError), self.rank.stdout as lines:
            for line in lines:
                self.last.append(line.rstrip("\n"))
                if self.show:
                    sys.stdout.write(f"[{self.rank}] {self.last[-1]}\n")
                    sys.stdout.flush()


def report(rank: Rank, what: str, followers: dict[Rank, Follower]) -> None:
    code = rank.returncode
    how = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
    print(f"[{rank}] {what}: {how}", file=sys.stderr)
    follower = followers.get(rank)
    if follower and not follower.show:
        follower.join(timeout=1)
        for line in list(follower.last):
            print(f"    {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
