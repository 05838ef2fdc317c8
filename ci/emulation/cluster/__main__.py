"""Command line: run a command as N nodes x M ranks on an emulated cluster, or clean up.

The exit code is 0 if every rank succeeded, otherwise that of the first rank that failed (128 plus
the signal number, as in a shell), and 2 for an invalid request or an unsuitable machine.
"""

import argparse
import collections
import contextlib
import subprocess
import sys
import threading

from ci.emulation.cluster import Cluster, Rank, as_completed, clean, exit_status

EXAMPLES = """\
examples:
  python -m ci.emulation.cluster --nodes 4 --ranks 2 --rate 200mbit -- python train.py --steps 10
  python -m ci.emulation.cluster --nodes 2 --prefix -- sh -c 'uname -n; env | grep RANK'
  python -m ci.emulation.cluster --clean

Requires root: use sudo with the Python of your environment, as in sudo .venv/bin/python.
The environment of each rank holds torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, ...): torch.distributed.init_process_group() needs only a backend."""

LAST_LINES = 20  # output lines shown for a failed rank
GRACE = 5.0  # seconds after the first failure in which other ranks may report their own


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m ci.emulation.cluster",
        usage="%(prog)s [options] -- COMMAND [ARGUMENTS]",
        description="Run a command on every rank of an emulated cluster on this machine. "
        "Nodes are\nLinux namespaces, each with a NIC, around one switch.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--ranks", type=int, default=1, metavar="M", help="per node (default: 1)")
    parser.add_argument(
        "--rate", help="limit of each NIC per direction: 200mbit, 1gbit, ... (default: no limit)"
    )
    parser.add_argument(
        "--prefix",
        action="store_true",
        help="show the output of all ranks with the prefix [node0 rank1]; by default only that "
        "of rank 0 and the last lines of a failed rank are shown",
    )
    parser.add_argument(
        "--clean", action="store_true", help="remove leftovers of killed runs and exit"
    )
    split = argv.index("--") if "--" in argv else len(argv)
    args, command = parser.parse_args(argv[:split]), argv[split + 1 :]
    if bool(command) == args.clean:
        parser.error("expected either --clean or a command after --")
    if args.ranks < 1:
        parser.error(f"--ranks {args.ranks}: must be at least 1")
    return exit_status(lambda: _clean() if args.clean else _run(args, command))


def _clean() -> int:
    print("\n".join(clean()) or "Nothing to remove.")
    return 0


def _run(args, command: list[str]) -> int:
    with Cluster(args.nodes, args.rate) as cluster:
        return run(cluster, args.ranks, command, args.prefix)


def run(cluster: Cluster, ranks_per_node: int, command: list[str], prefix: bool) -> int:
    """Run the command on every rank, show its output and return the exit code."""

    def piped(rank: int) -> bool:
        return prefix or rank > 0  # otherwise rank 0 inherits this process's terminal or file

    ranks = cluster.start(
        command,
        ranks_per_node,
        stdout=lambda rank: subprocess.PIPE if piped(rank) else None,
        stderr=lambda rank: subprocess.STDOUT if piped(rank) else None,
        text=True,
        errors="replace",
    )
    readers = {rank: OutputReader(rank, prefix) for rank in ranks if rank.stdout}
    first = next((rank for rank in as_completed(ranks) if rank.returncode), None)
    if first:
        running = [rank for rank in ranks if rank.returncode is None]
        ended = list(as_completed(running, GRACE))
        report(first, "was the first to fail", readers)
        for rank in ended:
            if rank.returncode:
                report(rank, "failed too", readers)
        if late := [str(rank) for rank in running if rank.returncode is None]:
            print(f"Killed, still running {GRACE:g} s later: {', '.join(late)}", file=sys.stderr)
    for reader in readers.values():
        if reader.rank.returncode is not None:
            reader.join(timeout=1)  # a child of the rank may keep the output open for longer
    if not first:
        return 0
    return first.returncode if first.returncode > 0 else 128 - first.returncode


class OutputReader(threading.Thread):
    """Thread that reads a rank's output, keeps the last lines and optionally prints each line."""

    def __init__(self, rank: Rank, show: bool):
        super().__init__(daemon=True)
        self.rank = rank
        self.show = show
        self.last = collections.deque(maxlen=LAST_LINES)
        self.start()

    def run(self) -> None:
        # When stdout is closed, close the rank's output too, so that the rank does not block.
        with contextlib.suppress(BrokenPipeError), self.rank.stdout as lines:
            for line in lines:
                self.last.append(line.rstrip("\n"))
                if self.show:
                    sys.stdout.write(f"[{self.rank}] {self.last[-1]}\n")
                    sys.stdout.flush()


def report(rank: Rank, event: str, readers: dict[Rank, OutputReader]) -> None:
    """Print how a rank ended and its last lines of output, unless they were shown."""
    code = rank.returncode
    cause = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
    print(f"[{rank}] {event}: {cause}", file=sys.stderr)
    reader = readers.get(rank)
    if reader and not reader.show:
        reader.join(timeout=1)
        for line in list(reader.last):
            print(f"    {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
