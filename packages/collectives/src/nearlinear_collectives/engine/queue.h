// Calls that run behind the caller's back: in order within a group, beside each other between
// groups. One thread serves all groups while it keeps up; another joins only when a group has
// work and every thread is held up in a collective, so that two groups whose calls were started
// in different orders on two ranks cannot block each other. It leaves when it has had nothing to do
// for a while.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace nlc {

class Queue : public std::enable_shared_from_this<Queue> {
 public:
  void add(std::function<void()> call);
  bool idle();       // nothing waits or runs
  void wait_idle();  // at once on a thread that is serving this queue: in a call's own callback

 private:
  friend class Workers;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> calls_;
  bool scheduled_ = false;  // given to the workers, or being served by one
};

int worker_threads();  // how many exist

}  // namespace nlc
