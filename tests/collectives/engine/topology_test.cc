// Placement of ranks on nodes, and its limit.
//
//   cd tests/collectives/engine &&
//   ENGINE=../../../packages/collectives/src/nearlinear_collectives/engine g++ -std=c++20 -g -O1
//       -Wall -Wextra -I$ENGINE topology_test.cc $ENGINE/{topology,base}.cc -o topology_test &&
//   ./topology_test
#include "topology.h"

#include <string>
#include <vector>

#include "base.h"
#include "check.h"

namespace {

using nlc::PeerInfo;
using nlc::Topology;

// Peers of `nodes` nodes whose ranks take turns.
std::vector<PeerInfo> peers(size_t nodes, size_t ranks_per_node) {
  std::vector<PeerInfo> found(nodes * ranks_per_node);
  for (size_t rank = 0; rank < found.size(); ++rank) found[rank].node[0] = 1 + rank % nodes;
  return found;
}

void test_ranks_are_placed_by_node() {
  const Topology topology = nlc::find_topology(peers(3, 2), 4);
  CHECK((topology.nodes == std::vector<std::vector<int>>{{0, 3}, {1, 4}, {2, 5}}));
  CHECK(topology.node == 1 && topology.local == 1 && !topology.leads());
}

void test_more_ranks_than_pieces_in_a_slot_are_refused() {
  CHECK(nlc::find_topology(peers(2048, 8), 0).size == 16384);
  CHECK(nlc::find_topology(peers(1, 20'000), 0).size == 20'000);  // needs no slot of all nodes
  try {
    nlc::find_topology(peers(2049, 8), 0);
  } catch (const nlc::Failure &failure) {
    CHECK(std::string(failure.what()).find("2049 nodes of up to 8 ranks") != std::string::npos);
    return;
  }
  CHECK(false);
}

}  // namespace

int main() {
  test_ranks_are_placed_by_node();
  test_more_ranks_than_pieces_in_a_slot_are_refused();
}
