// Placement of a group's ranks on nodes.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "peer_info.h"

namespace nlc {

struct Topology {
  int rank = 0;
  int size = 0;
  std::vector<std::vector<int>> nodes;  // ranks of each node, ascending; nodes by lowest rank
  std::vector<int> node_of;             // rank -> node
  int node = 0;                         // this rank's node
  int local = 0;                        // index of this rank among its node's ranks

  const std::vector<int> &neighbours() const { return nodes[static_cast<size_t>(node)]; }
  // Index of a rank of this node among the node's ranks.
  int local_of(int rank) const {
    const std::vector<int> &here = neighbours();
    return static_cast<int>(std::find(here.begin(), here.end(), rank) - here.begin());
  }
  int ranks_here() const { return static_cast<int>(neighbours().size()); }
  int node_count() const { return static_cast<int>(nodes.size()); }
  bool leads() const { return local == 0; }
};

// Place the group's ranks. Throws Failure for so many ranks that their smallest pieces would not
// fit a slot.
Topology find_topology(const std::vector<PeerInfo> &peer_infos, int rank);

}  // namespace nlc
