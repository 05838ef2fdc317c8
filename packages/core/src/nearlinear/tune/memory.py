"""How much memory a rank can still have: of its GPU, or its part of the machine's."""

from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import NearlinearError

CGROUPS = Path("/sys/fs/cgroup")


def free_memory(device: torch.device, ranks_on_node: int) -> int:
    """Bytes free for every rank: the least of all ranks. A collective call.

    Ranks on the CPU share what their node has. Raises NearlinearError where that is not known.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        dist.barrier()  # every process is as big as it starts with
        free = free_host_memory() // ranks_on_node
    least = torch.tensor(free, dtype=torch.int64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


def free_host_memory() -> int:
    """Bytes that processes of this machine can still have, within the limits of its cgroups."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        groups = Path("/proc/self/cgroup").read_text()
    except (OSError, StopIteration):
        raise NearlinearError(
            "this system does not tell how much memory is free: say it, as in --memory 8 (GiB per "
            "rank)"
        ) from None
    return min([int(available.split()[1]) * 1024, *cgroup_rooms(groups, CGROUPS)])


def cgroup_rooms(groups: str, mounted: Path) -> list[int]:
    """Bytes left within each limit that holds for this process.

    ``groups``: the text of /proc/self/cgroup. File cache that can be dropped counts as free. Inside
    a container its own group is the root of what is mounted.
    """
    rooms = []
    for line in groups.splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        base = mounted / kinds  # "" is version 2
        names = ("memory.max", "memory.current", "inactive_file")
        if kinds:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        below = path.strip("/").split("/") if path.strip("/") else []
        for depth in range(len(below) + 1):
            room = _room(base.joinpath(*below[:depth]), *names)
            rooms += [] if room is None else [room]
    return rooms


def _room(folder: Path, limit: str, used: str, cache: str) -> int | None:
    try:
        most = (folder / limit).read_text().strip()
        now = int((folder / used).read_text())
        stat = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if most == "max":
        return None
    return max(0, int(most) - now + int(stat.get(cache, 0)))
