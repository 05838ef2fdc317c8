// Shared outputs of a group: created on first use, reused after every neighbour has freed them.
#include "group.h"

#include <algorithm>

namespace nlc {

void *Group::allocate_shared(size_t bytes) {
  if (roster_.topology.node_count() > 1 || size() == 1 || bytes <= kSmallestShared) return nullptr;
  {
    const std::lock_guard<std::mutex> lock(outputs_mutex_);
    if (!outputs_) {
      std::vector<Fd> memories;
      size_t capacity = own_info_.arena_bytes;  // the same on all ranks
      try {
        for (const PeerInfo &peer : roster_.peers) {
          memories.push_back(open_memory_of(peer.pid, peer.output_fd));
          capacity = std::min<size_t>(capacity, peer.arena_bytes);
        }
      } catch (const Failure &) {
        return nullptr;  // a neighbour is gone; the next call reports which one
      }
      outputs_ = std::make_shared<SharedOutputs>(
          rank(), std::move(memories), capacity, [segment = own_mapping_](int number) {
            Counter &released = reinterpret_cast<Segment *>(segment->base())->released[number];
            released.raise(released.load() + 1);
          });
    }
  }
  return outputs_->allocate(
      bytes, [this](int number, uint32_t times) { return all_released(number, times); });
}

bool Group::all_released(int number, uint32_t times) {
  const Clock::time_point deadline = after_ms(timeout_ms_);
  for (int i = 0; i < ranks_here(); ++i) {
    Segment &other = *neighbour(i).segment;
    Counter &released = other.released[number];
    for (int tries = 0; !released.reached(times); ++tries) {
      // A neighbour that waits for this rank in a later call will not free the output before, so
      // the ranks do not agree on the order of allocations. (A failed or departed rank will not
      // either.)
      if (other.entered.load(std::memory_order_acquire) > own_->entered.load() ||
          other.failed.load() || other.closed.load() || aborted_.load() || Clock::now() >= deadline)
        return released.reached(times);
      if (tries < spin_budget_.spins)
        pause_cpu();
      else
        released.sleep(released.load(), 5);
    }
  }
  return true;
}

}  // namespace nlc
