// Shared outputs of a group: made on first use, reused when every neighbour has let go.
#include "group.h"

namespace nlc {

void *Group::allocate_shared(size_t bytes) {
  if (place_.node_count() > 1 || size() == 1 || bytes <= kSmallestShared) return nullptr;
  {
    const std::lock_guard<std::mutex> lock(outputs_mutex_);
    if (!outputs_) {
      std::vector<Fd> memories;
      try {
        for (const Card &card : cards_)
          memories.push_back(open_memory_of(card.pid, card.output_fd));
      } catch (const Failure &) {
        return nullptr;  // a neighbour is gone: the next call says which
      }
      outputs_ = std::make_shared<SharedOutputs>(
          rank(), std::move(memories), card_.arena_bytes, [segment = own_mapping_](int number) {
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
      // A neighbour that waits for me in a later call will not let go before: we do not agree on
      // the order of things. (Nor will one that has failed, or left.)
      if (other.entered.load(std::memory_order_acquire) > own_->entered.load() ||
          other.failed.load() || other.closed.load() || aborted_.load() || Clock::now() >= deadline)
        return released.reached(times);
      if (tries < patience_.spins)
        pause_cpu();
      else
        released.sleep(released.load(), 5);
    }
  }
  return true;
}

}  // namespace nlc
