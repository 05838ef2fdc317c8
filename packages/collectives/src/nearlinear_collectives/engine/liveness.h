// Detects dead processes of neighbours. A pidfd reports a death at once, even of a zombie that
// nobody has waited for, which kill(pid, 0) reports as alive.
#pragma once

#include <vector>

#include "peer_info.h"

namespace nlc {

class Liveness {
 public:
  Liveness(const std::vector<PeerInfo> &peer_infos, const std::vector<int> &ranks);
  std::vector<int> dead() const;  // the dead ranks; costs one system call

 private:
  struct Watched {
    int rank;
    Fd pidfd;  // without one (old kernels), /proc is read
    PeerInfo peer;
  };
  std::vector<Watched> watched_;
};

}  // namespace nlc
