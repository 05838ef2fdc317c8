#include "queue.h"

#include <pthread.h>

#include <chrono>
#include <thread>

namespace nlc {

namespace {
thread_local const Queue *served = nullptr;

constexpr std::chrono::seconds kIdleTimeout{1};  // after which a spare thread exits
}  // namespace

class Workers {
 public:
  static Workers &all() {
    static Workers *workers = make();  // never destroyed: threads may outlive static objects
    return *workers;
  }

  void serve(std::shared_ptr<Queue> queue) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ready_.push_back(std::move(queue));
    if (idle_ < static_cast<int>(ready_.size())) {
      ++threads_;
      std::thread([this] { work(); }).detach();
    } else {
      wake_.notify_one();
    }
  }

  int threads() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return threads_;
  }

 private:
  static Workers *make() {
    pthread_atfork(nullptr, nullptr, [] { new (&all()) Workers(); });  // no thread survives a fork
    return new Workers();
  }

  void work() {
    pthread_setname_np(pthread_self(), "nearlinear");
    std::unique_lock<std::mutex> lock(mutex_);
    ++idle_;
    while (wait_for_work(lock)) {
      --idle_;
      const std::shared_ptr<Queue> queue = std::move(ready_.front());
      ready_.pop_front();
      lock.unlock();
      drain(*queue);
      lock.lock();
    }
    --idle_;
    --threads_;
  }

  // Return false for a thread that is no longer needed. The last one stays.
  bool wait_for_work(std::unique_lock<std::mutex> &lock) {
    const auto ready = [this] { return !ready_.empty(); };
    if (!wake_.wait_for(lock, kIdleTimeout, ready)) {
      if (threads_ > 1) return false;
      wake_.wait(lock, ready);
    }
    return true;
  }

  // Count this thread as idle before anybody can see that the queue is idle: the next caller then
  // finds it and starts no further thread.
  void drain(Queue &queue) {
    std::unique_lock<std::mutex> lock(queue.mutex_);
    served = &queue;
    while (!queue.calls_.empty()) {
      const std::function<void()> call = std::move(queue.calls_.front());
      queue.calls_.pop_front();
      lock.unlock();
      call();
      // The call's own callback has started another thread: add().
      if (served != &queue) return free();
      lock.lock();
    }
    free();
    served = nullptr;
    queue.scheduled_ = false;
    queue.changed_.notify_all();
  }

  void free() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++idle_;
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Queue>> ready_;
  int idle_ = 0;
  int threads_ = 0;
};

void Queue::add(std::function<void()> call) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_.push_back(std::move(call));
    if (served == this) {
      // Called from a callback of the call that this thread has just run. The callback may wait for
      // the new call, so another thread continues the queue.
      served = nullptr;
    } else if (scheduled_) {
      return;
    }
    scheduled_ = true;
  }
  Workers::all().serve(shared_from_this());
}

bool Queue::idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !scheduled_;
}

void Queue::wait_idle() {
  if (served == this) return;
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return !scheduled_; });
}

int worker_threads() { return Workers::all().threads(); }

}  // namespace nlc
