#include "topology.h"

#include <map>
#include <utility>

namespace nlc {

Topology find_topology(const std::vector<Card> &cards, int rank) {
  Topology place;
  place.rank = rank;
  place.size = static_cast<int>(cards.size());
  std::map<std::pair<uint64_t, uint64_t>, int> known;
  for (int r = 0; r < place.size; ++r) {
    const Card &card = cards[static_cast<size_t>(r)];
    const auto [found, is_new] =
        known.try_emplace({card.node[0], card.node[1]}, static_cast<int>(place.nodes.size()));
    if (is_new) place.nodes.emplace_back();
    auto &ranks = place.nodes[static_cast<size_t>(found->second)];
    if (r == rank) place.node = found->second, place.local = static_cast<int>(ranks.size());
    ranks.push_back(r);
    place.node_of.push_back(found->second);
  }
  return place;
}

}  // namespace nlc
