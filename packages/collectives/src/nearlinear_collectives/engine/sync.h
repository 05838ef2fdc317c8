// Counters in shared memory that one rank raises and others wait for.
//
// A wait spins for as long as a neighbour on its own core would need to answer, then yields a
// few times, then sleeps on a futex: pure spinning collapses when ranks outnumber cores, pure
// sleeping costs tens of microseconds per operation.
#pragma once

#include <atomic>
#include <cstdint>

namespace nlc {

// One writer, any number of readers. Values only grow and may wrap: compare with reached().
struct alignas(64) Counter {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  uint32_t load() const { return value.load(std::memory_order_acquire); }
  bool reached(uint32_t target) const { return static_cast<int32_t>(load() - target) >= 0; }
  void raise(uint32_t to);  // publishes everything written before, wakes the sleepers

  // Sleeps until the value is no longer `seen`, at most `ms`. May return early.
  void sleep(uint32_t seen, int ms);
};

struct Patience {
  int spins;
  int yields;
};

// How long to stay awake, given how many ranks share how many cores.
Patience patience(int ranks_on_node, int cores);

int cores_of_this_process();

// Moves this thread to another core, if it may run on one.
void leave_core(int core);

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace nlc
