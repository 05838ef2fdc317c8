// Counters in shared memory that one rank raises and others wait for.
//
// A wait spins as long as a neighbour on its own core would need to answer, then yields a few
// times, then sleeps on a futex. Pure spinning collapses if ranks outnumber cores; pure sleeping
// costs tens of microseconds per operation.
#pragma once

#include <atomic>
#include <cstdint>

namespace nlc {

// One writer of raise(), any number of readers. Values only grow and may wrap; compare with
// reached().
struct alignas(64) Counter {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  uint32_t load() const { return value.load(std::memory_order_acquire); }
  bool reached(uint32_t target) const { return static_cast<int32_t>(load() - target) >= 0; }
  void raise(uint32_t to);  // publishes all earlier writes and wakes the sleepers
  void add();               // likewise, for several writers

  // Sleep until the value differs from `seen`, at most `ms`. May return early.
  void sleep(uint32_t seen, int ms);
};

struct SpinBudget {
  int spins;
  int yields;
};

// Spins and yields before sleeping, for a number of ranks that share a number of cores.
SpinBudget spin_budget(int ranks_on_node, int cores);

int cores_of_this_process();

// Move this thread to another core, if it may run on one.
void leave_core(int core);

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace nlc
