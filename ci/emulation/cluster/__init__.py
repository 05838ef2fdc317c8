"""An emulated cluster on one Linux machine: nodes are namespaces, links have a rate.

Each node has its own network, host name, IPC namespace, /dev/shm, /sys and /etc/hosts, and one NIC,
``eth0``, connected to a switch. Processors (unless each node has a share), memory, process ids, the
boot id and all other files are shared, and links have no propagation delay. See
`python -m ci.emulation.cluster --help`.
"""

from ci.emulation.cluster.namespaces import ClusterError, clean, unavailable_reason
from ci.emulation.cluster.nodes import Cluster, Counters, exit_status
from ci.emulation.cluster.ranks import Rank, RankFailed, as_completed

__all__ = [
    "Cluster",
    "ClusterError",
    "Counters",
    "Rank",
    "RankFailed",
    "as_completed",
    "clean",
    "exit_status",
    "unavailable_reason",
]
