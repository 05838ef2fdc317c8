"""An emulated cluster on one Linux machine: nodes are namespaces, links have a rate.

Each node has a network, host name, IPC space, /dev/shm, /sys and /etc/hosts of its own, and one
NIC, ``eth0``, cabled to a switch. Processors, memory, process ids, the boot id and all other files
are shared, and links have no propagation delay. Command line: `python -m ci.cluster --help`.
"""

from ci.cluster.command import status_of
from ci.cluster.namespaces import ClusterError, clean, why_not
from ci.cluster.nodes import Cluster, Counters
from ci.cluster.ranks import Rank, RankFailed, in_order_of_end

__all__ = [
    "Cluster",
    "ClusterError",
    "Counters",
    "Rank",
    "RankFailed",
    "clean",
    "in_order_of_end",
    "status_of",
    "why_not",
]
