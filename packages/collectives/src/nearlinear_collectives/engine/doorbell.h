// Wakes a leader that waits for the ranks of its node while it sleeps in poll() on its sockets.
//
// Implemented as a pipe, because other processes can open its write end through /proc. An eventfd
// cannot be opened that way, and a futex cannot be polled. Only the rank that clears the leader's
// `listening` flag writes, so there is one byte per sleep.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>

#include "base.h"
#include "memory.h"

namespace nlc {

class Doorbell {
 public:
  // Create the leader's own doorbell. `listening` is in memory that all callers can write to.
  void create() {
    int ends[2];
    if (::pipe2(ends, O_NONBLOCK | O_CLOEXEC) != 0) throw system_failure("cannot create a pipe");
    read_end_ = Fd(ends[0]);
    write_end_ = Fd(ends[1]);
  }
  // Open another leader's doorbell instead. The pipe is opened for reading too, so that a write
  // never meets a pipe without readers.
  void open(int pid, int fd) {
    write_end_ = open_memory_of(pid, fd);
    read_end_ = Fd();
  }

  int read_fd() const { return read_end_.get(); }
  int write_fd() const { return write_end_.get(); }

  // Wake the leader after a counter was raised.
  void notify(std::atomic<uint32_t> &listening) const {
    if (!write_end_ || !listening.load(std::memory_order_seq_cst)) return;
    if (listening.exchange(0, std::memory_order_seq_cst)) (void)!::write(write_end_.get(), "!", 1);
  }

 private:
  Fd read_end_, write_end_;
};

}  // namespace nlc
