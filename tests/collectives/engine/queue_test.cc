// Asynchronous calls: their order, and the number of threads that serve them.
//
//   cd tests/collectives/engine &&
//   ENGINE=../../../packages/collectives/src/nearlinear_collectives/engine g++ -std=c++20 -g -O1
//       -Wall -Wextra -fsanitize=thread -I$ENGINE queue_test.cc $ENGINE/queue.cc -o queue_test &&
//   ./queue_test
#include "queue.h"

#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"

namespace {

using Clock = std::chrono::steady_clock;
using nlc::Queue;
using nlc::worker_threads;

void test_calls_keep_their_order() {
  const auto queue = std::make_shared<Queue>();
  std::vector<int> seen;
  for (int number = 0; number < 10'000; ++number) {
    queue->add([&seen, number] { seen.push_back(number); });
  }
  queue->wait_idle();
  CHECK(queue->idle() && seen.size() == 10'000);
  for (int number = 0; number < 10'000; ++number) CHECK(seen[number] == number);
}

void test_one_thread_is_enough_for_queues_that_take_turns() {
  for (int turn = 0; turn < 20'000; ++turn) {
    const auto queue = std::make_shared<Queue>();
    queue->add([] {});
    queue->wait_idle();
    CHECK(worker_threads() == 1);
  }
}

void test_a_held_up_queue_holds_up_no_other() {
  std::promise<void> released;
  const auto held = std::make_shared<Queue>(), other = std::make_shared<Queue>();
  held->add([&] { released.get_future().wait(); });
  other->add([&] { released.set_value(); });
  held->wait_idle();
  other->wait_idle();
}

void test_a_call_may_wait_for_one_that_it_adds() {
  const auto queue = std::make_shared<Queue>();
  std::promise<void> first, second;
  queue->add([&] {
    queue->add([&] { second.set_value(); });
    second.get_future().wait();
    first.set_value();
  });
  first.get_future().wait();
  queue->wait_idle();
}

void test_spare_threads_leave() {
  constexpr int kQueues = 5;
  std::promise<void> released;
  const std::shared_future<void> release = released.get_future().share();
  std::vector<std::shared_ptr<Queue>> queues;
  for (int number = 0; number < kQueues; ++number) {
    queues.push_back(std::make_shared<Queue>());
    queues.back()->add([release] { release.wait(); });
  }
  CHECK(worker_threads() >= kQueues);
  released.set_value();
  for (const auto &queue : queues) queue->wait_idle();
  const auto limit = Clock::now() + std::chrono::seconds(60);
  while (worker_threads() > 1 && Clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  CHECK(worker_threads() == 1);
  test_calls_keep_their_order();  // the last thread still exists
  test_a_held_up_queue_holds_up_no_other();
}

}  // namespace

int main() {
  test_calls_keep_their_order();
  test_one_thread_is_enough_for_queues_that_take_turns();
  test_a_held_up_queue_holds_up_no_other();
  test_a_call_may_wait_for_one_that_it_adds();
  test_spare_threads_leave();
}
