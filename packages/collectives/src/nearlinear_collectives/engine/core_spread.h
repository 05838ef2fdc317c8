// Keeps ranks apart that outnumber the cores of their node.
//
// The scheduler wakes a rank on the core of the waking rank and can leave several there for long.
// If a core has more ranks than its share, the last of them move away.
#pragma once

#include <vector>

#include "segment.h"

namespace nlc {

class CoreSpread {
 public:
  CoreSpread() = default;
  // `here`: segments of the node's ranks, of which this one is `local`.
  CoreSpread(std::vector<Segment *> here, int local, int cores)
      : here_(std::move(here)),
        local_(static_cast<size_t>(local)),
        share_((static_cast<int>(here_.size()) + cores - 1) / cores) {}

  // Publish the core on which this thread runs, and leave it if it has too many ranks.
  void look(int core) {
    here_[local_]->core.store(core, std::memory_order_relaxed);
    const Clock::time_point now = Clock::now();
    if (now - last_move_ < std::chrono::milliseconds(2)) return;
    last_move_ = now;
    int before_me = 0;
    for (size_t i = 0; i < local_; ++i)
      before_me += here_[i]->core.load(std::memory_order_relaxed) == core;
    if (before_me >= share_) leave_core(core);
  }

 private:
  std::vector<Segment *> here_;
  size_t local_ = 0;
  int share_ = 1;
  Clock::time_point last_move_{};
};

}  // namespace nlc
