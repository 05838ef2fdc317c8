// The ranks of a group: their names in messages, processes and places.
#pragma once

#include <string>
#include <vector>

#include "peer_info.h"
#include "topology.h"

namespace nlc {

struct Roster {
  std::string name;                   // of the group
  std::vector<int64_t> global_ranks;  // for messages
  std::vector<PeerInfo> peers;
  Topology topology;

  const PeerInfo &peer(int rank) const { return peers[static_cast<size_t>(rank)]; }
  long long global(int rank) const {
    return static_cast<long long>(global_ranks[static_cast<size_t>(rank)]);
  }
  // "rank 3 (host a, pid 4711)".
  std::string rank_text(int rank) const {
    return format("rank %lld (host %s, pid %d)", global(rank), peer(rank).host, peer(rank).pid);
  }
  // The text of an error of this rank.
  std::string failure_text(int rank, const std::string &text) const {
    return format("nearlinear group '%s', rank %lld: %s", name.c_str(), global(rank), text.c_str());
  }
};

}  // namespace nlc
