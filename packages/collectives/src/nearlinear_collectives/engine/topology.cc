#include "topology.h"

#include <algorithm>
#include <map>
#include <utility>

#include "segment.h"

namespace nlc {

Topology find_topology(const std::vector<PeerInfo> &peer_infos, int rank) {
  Topology topology;
  topology.rank = rank;
  topology.size = static_cast<int>(peer_infos.size());
  std::map<std::pair<uint64_t, uint64_t>, int> known;
  for (int r = 0; r < topology.size; ++r) {
    const PeerInfo &peer = peer_infos[static_cast<size_t>(r)];
    const auto [found, is_new] =
        known.try_emplace({peer.node[0], peer.node[1]}, static_cast<int>(topology.nodes.size()));
    if (is_new) topology.nodes.emplace_back();
    auto &ranks = topology.nodes[static_cast<size_t>(found->second)];
    if (r == rank) topology.node = found->second, topology.local = static_cast<int>(ranks.size());
    ranks.push_back(r);
    topology.node_of.push_back(found->second);
  }
  size_t most = 1;
  for (const auto &ranks : topology.nodes) most = std::max(most, ranks.size());
  const size_t limit = kSlotBytes / kSmallestPiece;
  if (topology.nodes.size() > 1 && topology.nodes.size() * most > limit)
    throw Failure(NLC_BAD_ARGUMENT,
                  format("%zu nodes of up to %zu ranks exceed the %zu ranks that a group over "
                         "several nodes may have: use smaller groups",
                         topology.nodes.size(), most, limit));
  return topology;
}

}  // namespace nlc
