// Ranks as threads of one process, over the code that processes run. A thread sanitizer then sees
// races between ranks; two processes map shared memory at different addresses, which hides them.
//
//   g++ -std=c++20 -O1 -g -fsanitize=thread engine/*.cc ranks_as_threads_test.cc -lpthread -ldl
//   ./a.out [ranks] [rounds] [seed]
//
// Every round draws an operation, a size and a memory location, equal on all ranks, and checks the
// result. Built with -DNLC_WEAKENED_FENCE the engine publishes its counters without ordering, which
// the sanitizer must report.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <random>
#include <thread>
#include <vector>

#include "nearlinear_collectives.h"

namespace {

std::atomic<int> failures{0};

void expect(bool truth, const char *what, int rank, int round) {
  if (truth) return;
  if (failures.fetch_add(1) < 10)
    std::fprintf(stderr, "rank %d, round %d: wrong %s\n", rank, round, what);
}

void must(int32_t status, const char *what) {
  if (status == NLC_OK) return;
  std::fprintf(stderr, "%s: %s\n", what, nlc_error());
  std::exit(3);
}

// Element i of the contribution of `rank` in a round: small integers, so that sums are exact in any
// order.
int32_t value(int rank, int round, size_t i) {
  return static_cast<int32_t>(
      (static_cast<size_t>(rank) * 31 + static_cast<size_t>(round) * 7 + i) % 101);
}

struct Buffer {
  Buffer(size_t count, bool pooled) : pooled(pooled), owned(pooled ? 0 : count + 1) {
    data = pooled ? static_cast<int32_t *>(nlc_pool_allocate(count * 4 + 4)) : owned.data();
  }
  ~Buffer() {
    if (pooled) nlc_pool_free(data);
  }
  bool pooled;
  std::vector<int32_t> owned;
  int32_t *data;
};

struct Waited {
  std::atomic<int> done{0};
  static void mark(void *context, int32_t status, const char *error) {
    if (status != NLC_OK)
      std::fprintf(stderr, "asynchronous call: %s\n", error), failures.fetch_add(1);
    static_cast<Waited *>(context)->done.store(1, std::memory_order_release);
  }
  void wait() {
    while (!done.load(std::memory_order_acquire)) std::this_thread::yield();
  }
};

void run(nlc_group *group, const nlc_call &call, bool background) {
  if (!background) return must(nlc_run(group, &call), "nlc_run");
  Waited waited;
  must(nlc_start(group, &call, &Waited::mark, &waited), "nlc_start");
  waited.wait();
}

// Elements that one rank sends another in an exchange of a given size.
size_t part_of(size_t count, int from, int to) {
  return count * static_cast<size_t>((from + 2 * to) % 3);
}

void exchange(int rank, int size, int round, size_t count, bool pooled, bool background,
              nlc_group *group) {
  size_t sent = 0, received = 0;
  for (int r = 0; r < size; ++r)
    sent += part_of(count, rank, r), received += part_of(count, r, rank);
  Buffer input(sent, pooled), output(received, pooled);
  std::vector<nlc_part> sends, receives;
  size_t in = 0, out = 0;
  for (int r = 0; r < size; ++r) {
    sends.push_back({input.data + in, part_of(count, rank, r)});
    for (size_t i = 0; i < sends.back().count; ++i)
      input.data[in++] = value(rank, round, i + static_cast<size_t>(r));
    receives.push_back({output.data + out, part_of(count, r, rank)});
    out += receives.back().count;
  }
  nlc_call call{};
  call.kind = NLC_ALL_TO_ALL;
  call.dtype = NLC_INT32;
  call.count = sent;
  call.scale = 1.0;
  call.sends = sends.data();
  call.receives = receives.data();
  call.timeout_ms = NLC_ANY_TIMEOUT;
  run(group, call, background);
  bool right = true;
  out = 0;
  for (int r = 0; r < size; ++r)
    for (size_t i = 0; i < part_of(count, r, rank); ++i)
      right = right && output.data[out++] == value(r, round, i + static_cast<size_t>(rank));
  expect(right, "all_to_all", rank, round);
}

// Every rank sends every other rank three messages, and receives theirs in another order of tags:
// those of the last tag from any rank.
void exchange_messages(int rank, int size, int round, size_t count, bool pooled, bool background,
                       nlc_group *group) {
  struct Message {
    Message(size_t count, bool pooled) : buffer(count, pooled) {}
    Buffer buffer;
    Waited waited;
    nlc_transfer *transfer = nullptr;
    int tag = 0;
  };
  std::list<Message> messages;
  const auto post = [&](int kind, int other, int tag, size_t elements) {
    Message &one = messages.emplace_back(elements, pooled);
    one.tag = tag;
    if (kind == NLC_SEND)
      for (size_t i = 0; i < elements; ++i)
        one.buffer.data[i] = value(rank, round, i + static_cast<size_t>(tag));
    nlc_call call{};
    call.kind = kind;
    call.dtype = NLC_INT32;
    call.count = elements;
    call.root = other;
    call.tag = 3 * round + tag;  // a rank may be a round ahead
    call.output = one.buffer.data;
    call.timeout_ms = NLC_ANY_TIMEOUT;
    must(nlc_post(group, &call, &Waited::mark, &one.waited, &one.transfer), "nlc_post");
  };
  const auto elements_of = [&](int tag) { return count + static_cast<size_t>(tag); };
  for (int r = 0; r < size; ++r)
    for (int tag = 0; r != rank && tag < 3; ++tag) post(NLC_SEND, r, tag, elements_of(tag));
  const auto sent = static_cast<size_t>(3 * (size - 1));
  for (int r = 0; r < size; ++r)
    for (int i = 0; r != rank && i < 3; ++i) {
      const int tag = (i + round) % 3;
      post(NLC_RECEIVE, tag == 2 ? NLC_ANY_RANK : r, tag, elements_of(tag));
    }
  size_t number = 0;
  for (Message &one : messages) {
    if (background)
      one.waited.wait();
    else
      must(nlc_transfer_wait(one.transfer, 0), "nlc_transfer_wait");
    one.waited.wait();
    const int from = nlc_transfer_rank(one.transfer);
    bool right = true;
    for (size_t i = 0; number >= sent && i < elements_of(one.tag); ++i)
      right = right &&
              one.buffer.data[i] == value(from, round, i + static_cast<size_t>(one.tag));
    expect(right, "message", rank, round);
    nlc_transfer_free(one.transfer);
    ++number;
  }
}

void rank_main(int rank, int size, int rounds, unsigned seed, nlc_group *group) {
  std::mt19937 random(seed);  // equal draws on all ranks
  const auto n = static_cast<size_t>(size);
  for (int round = 0; round < rounds; ++round) {
    const int kind = static_cast<int>(random() % 7) + 1;
    const size_t sizes[] = {0, 1, 63, 1000, 9001, 70000, 300001};
    const size_t count = sizes[random() % 7];
    const bool pooled_input = random() % 2, pooled_output = random() % 2, in_place = random() % 2;
    const bool background = random() % 4 == 0;
    const int root = static_cast<int>(random() % n);
    if (kind == NLC_ALL_TO_ALL) {
      exchange(rank, size, round, count, pooled_input, background, group);
      continue;
    }
    if (kind > NLC_ALL_TO_ALL) {
      exchange_messages(rank, size, round, count, pooled_input, background, group);
      continue;
    }
    const bool gathers = kind == NLC_ALL_GATHER, scatters = kind == NLC_REDUCE_SCATTER;
    Buffer input(scatters ? n * count : count, pooled_input),
        output(gathers ? n * count : count, pooled_output);
    int32_t *in = input.data;
    if (gathers && in_place) in = output.data + static_cast<size_t>(rank) * count;
    for (size_t i = 0; i < (scatters ? n * count : count); ++i) in[i] = value(rank, round, i);
    if (!gathers && !scatters)
      for (size_t i = 0; i < count; ++i) output.data[i] = value(rank, round, i);
    nlc_call call{};
    call.kind = kind;
    call.dtype = NLC_INT32;
    call.reduce = NLC_SUM;
    call.root = kind == NLC_BROADCAST ? root : 0;
    call.count = kind == NLC_BARRIER ? 0 : count;
    call.scale = 1.0;
    call.input = in;
    call.output = output.data;
    call.timeout_ms = NLC_ANY_TIMEOUT;
    run(group, call, background);
    bool right = true;
    for (size_t i = 0; right && i < count; ++i) {
      int32_t sum = 0, sum_of_mine = 0;
      for (int r = 0; r < size; ++r) {
        sum += value(r, round, i);
        sum_of_mine += value(r, round, static_cast<size_t>(rank) * count + i);
        if (gathers)
          right = right && output.data[static_cast<size_t>(r) * count + i] == value(r, round, i);
      }
      if (scatters) right = output.data[i] == sum_of_mine;
      if (kind == NLC_ALL_REDUCE) right = output.data[i] == sum;
      if (kind == NLC_BROADCAST) right = output.data[i] == value(root, round, i);
    }
    const char *names[] = {"",           "all_gather", "reduce_scatter",
                           "all_reduce", "broadcast",  "barrier"};
    expect(right, names[kind], rank, round);
  }
}

}  // namespace

int main(int argc, char **argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 4, rounds = argc > 2 ? std::atoi(argv[2]) : 60;
  const unsigned seed = argc > 3 ? static_cast<unsigned>(std::atoi(argv[3])) : 1;
  const auto n = static_cast<size_t>(size);
  std::vector<unsigned char> peer_infos(n * NLC_PEER_INFO_BYTES);
  std::vector<nlc_group *> groups(n);
  for (int r = 0; r < size; ++r) {
    const nlc_options options{r, size, 60000, "threads", nullptr};
    must(nlc_group_open(&options, peer_infos.data() + static_cast<size_t>(r) * NLC_PEER_INFO_BYTES,
                        &groups[static_cast<size_t>(r)]),
         "open");
  }
  std::vector<std::thread> ranks;
  for (int r = 0; r < size; ++r)
    ranks.emplace_back([&, r] {
      nlc_group *group = groups[static_cast<size_t>(r)];
      must(nlc_group_connect(group, peer_infos.data(), 60000), "connect");
      rank_main(r, size, rounds, seed, group);
    });
  for (std::thread &rank : ranks) rank.join();
  for (nlc_group *group : groups) nlc_group_close(group);
  std::printf("%d ranks, %d rounds: %d failures\n", size, rounds, failures.load());
  return failures.load() ? 1 : 0;
}
