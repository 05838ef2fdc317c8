// Wakes a leader that waits for its node's ranks while it sleeps on its sockets.
//
// A pipe, since its writing end can be opened by other processes through /proc; of eventfds and
// futexes one cannot be, the other cannot be polled. One byte per sleep: who takes the leader's
// `listening` flag rings, the others need not.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>

#include "base.h"
#include "memory.h"

namespace nlc {

class Doorbell {
 public:
  // The leader's own. `listening` lies in memory that all its callers can write to.
  void hang() {
    int ends[2];
    if (::pipe2(ends, O_NONBLOCK | O_CLOEXEC) != 0) throw system_failure("cannot make a pipe");
    hear_ = Fd(ends[0]);
    ring_ = Fd(ends[1]);
  }
  // A neighbour's way to it, in place of its own. Opened for reading too, so that no write ever
  // meets a pipe without readers.
  void find(int pid, int fd) {
    ring_ = open_memory_of(pid, fd);
    hear_ = Fd();
  }

  int hearing() const { return hear_.get(); }
  int ringing() const { return ring_.get(); }

  // After a counter was raised.
  void ring(std::atomic<uint32_t> &listening) const {
    if (!ring_ || !listening.load(std::memory_order_seq_cst)) return;
    if (listening.exchange(0, std::memory_order_seq_cst)) (void)!::write(ring_.get(), "!", 1);
  }

 private:
  Fd hear_, ring_;
};

}  // namespace nlc
