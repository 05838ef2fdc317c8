#include "sync.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace nlc {
namespace {

long futex(std::atomic<uint32_t> *word, int operation, uint32_t value, const timespec *timeout) {
  return syscall(SYS_futex, word, operation, value, timeout, nullptr, 0);
}

}  // namespace

void Counter::raise(uint32_t to) {
#ifdef NLC_WEAKENED_FENCE  // set by a test, which expects a thread sanitizer to report it
  value.store(to, std::memory_order_relaxed);
#else
  // An exchange is a full barrier: the sleepers are read after the new value is visible.
  value.exchange(to, std::memory_order_seq_cst);
#endif
  if (sleepers.load(std::memory_order_seq_cst)) futex(&value, FUTEX_WAKE, INT_MAX, nullptr);
}

void Counter::add() {
  value.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst)) futex(&value, FUTEX_WAKE, INT_MAX, nullptr);
}

void Counter::sleep(uint32_t seen, int ms) {
  const timespec limit{ms / 1000, (ms % 1000) * 1000000L};
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (value.load(std::memory_order_seq_cst) == seen) futex(&value, FUTEX_WAIT, seen, &limit);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

SpinBudget spin_budget(int ranks_on_node, int cores) {
  if (ranks_on_node <= cores) return {2000, 20};
  return {60, 20};
}

void leave_core(int core) {
  cpu_set_t allowed;
  if (core < 0 || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  cpu_set_t others = allowed;
  CPU_CLR(core, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
  sched_setaffinity(0, sizeof allowed, &allowed);
}

int cores_of_this_process() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
  return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

}  // namespace nlc
