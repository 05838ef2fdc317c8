// Asynchronous calls: in order within a group, concurrent between groups. One thread serves all
// groups while it keeps up. Another one is started only if a group has work and every thread is
// blocked in a collective, so that two groups whose calls were started in different orders on two
// ranks cannot deadlock. It exits after it has been idle for a while.
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
  void wait_idle();  // returns at once on a thread that serves this queue (in a call's callback)

 private:
  friend class Workers;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> calls_;
  bool scheduled_ = false;  // handed to the workers, or served by one
};

int worker_threads();  // number of existing threads

}  // namespace nlc
