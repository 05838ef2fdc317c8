// Which neighbours' processes are still there. A pidfd tells of a death at once, even of a
// process that nobody has waited for yet, where kill(pid, 0) would see a living zombie.
#pragma once

#include <vector>

#include "card.h"

namespace nlc {

class Liveness {
 public:
  Liveness(const std::vector<Card> &cards, const std::vector<int> &ranks);
  // The first rank found dead, or -1. Costs one system call.
  int first_dead();

 private:
  struct Watched {
    int rank;
    Fd pidfd;  // without one (an old kernel), /proc is asked
    Card card;
  };
  std::vector<Watched> watched_;
};

}  // namespace nlc
