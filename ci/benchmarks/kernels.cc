// Copy and reduction throughput of the engine's loops, in GB/s of bytes read and written, summed
// over processes that run the same loop concurrently. Best of several rounds.
//
//   cd packages/collectives/src/nearlinear_collectives/engine
//   g++ -std=c++20 -O3 -I. ../../../../../ci/benchmarks/kernels.cc reduce{,_baseline,_avx2,_avx512}.cc copy.cc -o /tmp/kernels
//   /tmp/kernels copy 1; /tmp/kernels copy 2; /tmp/kernels reduce 2
//
// stream_threshold() and the slot sizes are derived from these tables.

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "copy.h"
#include "reduce.h"
#include "reduce_kernels.h"

namespace {

constexpr int kProcesses = 16;
constexpr int kRounds = 5;
constexpr size_t kSlot = size_t{128} << 10;
constexpr size_t kSlots = 4;
constexpr size_t kHugePage = size_t{2} << 20;

// Fill the memory, so that no page fault is measured.
char *memory(size_t bytes, bool shared) {
  bytes = (bytes + 2 * kHugePage - 1) / kHugePage * kHugePage;
  void *start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  char *aligned = reinterpret_cast<char *>(
      (reinterpret_cast<uintptr_t>(start) + kHugePage - 1) / kHugePage * kHugePage);
  madvise(start, bytes, MADV_HUGEPAGE);
  std::memset(start, 0, bytes);
  return aligned;
}

struct Shared {
  std::atomic<int> arrived;
  double seconds[kProcesses];
};

// The processes of one run, which start every measurement together.
struct Team {
  explicit Team(int size) : size(size) {
    shared = reinterpret_cast<Shared *>(memory(sizeof(Shared), true));
    while (rank + 1 < size && fork() == 0) ++rank;  // each forks the next
  }

  ~Team() {
    while (wait(nullptr) > 0) continue;
  }

  void barrier() {
    target += size;
    shared->arrived.fetch_add(1);
    while (shared->arrived.load() < target) continue;
  }

  // GB/s of all processes together.
  double rate(size_t bytes, const std::function<void()> &work) {
    const int repeats = static_cast<int>(std::clamp<size_t>((size_t{64} << 20) / bytes, 1, 20000));
    double best = 1e30;
    for (int round = 0; round < kRounds; ++round) {
      barrier();
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < repeats; ++i) work();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      best = std::min(best, took.count() / repeats);
    }
    shared->seconds[rank] = best;
    barrier();
    double sum = 0;
    for (int r = 0; r < size; ++r) sum += static_cast<double>(bytes) / shared->seconds[r] / 1e9;
    barrier();
    return sum;
  }

  template <class... Values>
  void print(const char *format, Values... values) {
    if (rank == 0) std::printf(format, values...), std::fflush(stdout);
  }

  int size, rank = 0, target = 0;
  Shared *shared;
};

std::string size_text(size_t bytes) {
  return bytes < (1 << 20) ? std::to_string(bytes >> 10) + " KiB"
                           : std::to_string(bytes >> 20) + " MiB";
}

void plain_memcpy(void *to, const void *from, size_t bytes, bool) { std::memcpy(to, from, bytes); }

// Copy a large tensor through reused slots, and from memory to memory.
void benchmark_copy(Team &team) {
  const size_t largest = size_t{256} << 20;
  char *from = memory(largest, true), *to = memory(largest, false);
  char *slots = memory(kSlots * kSlot, true);
  using Copy = void (*)(void *, const void *, size_t, bool);
  enum Path { kIntoSlots, kFromSlots, kDirect };
  const char *names[] = {"into slots of 128 KiB", "from slots of 128 KiB", "memory to memory"};

  team.print("%d processes; plain memory streams from %s with this many ranks\n", team.size,
             size_text(nlc::stream_threshold(team.size)).c_str());
  for (const Path path : {kIntoSlots, kFromSlots, kDirect}) {
    team.print("\n%-24s%10s%10s%10s\n", names[path], "memcpy", "copy", "streamed");
    for (size_t size = size_t{16} << 10; size <= largest; size *= 2) {
      auto rate = [&](Copy copy, bool stream) {
        return team.rate(2 * size, [&] {
          const size_t piece = path == kDirect ? size : std::min(size, kSlot);
          for (size_t at = 0; at < size; at += piece) {
            char *slot = slots + at / kSlot % kSlots * kSlot;
            copy(path == kIntoSlots ? slot : to + at, path == kFromSlots ? slot : from + at, piece,
                 stream);
          }
        });
      };
      const double before = rate(plain_memcpy, false), plain = rate(nlc::copy, false);
      team.print("%-24s%10.1f%10.1f%10.1f\n", size_text(size).c_str(), before, plain,
                 rate(nlc::copy, true));
    }
  }
}

// Reduce all sources at once or pairwise, and copy the same number of bytes.
void benchmark_reduce(Team &team) {
  std::vector<const nlc::Kernels *> sets{&nlc::baseline_kernels()};
  for (const nlc::Kernels *set : {nlc::avx2_kernels(), nlc::avx512_kernels()}) {
    if (set != nullptr) sets.push_back(set);
  }
  const size_t largest = size_t{32} << 20;
  const int most = 8;
  char *arena = memory((most + 1) * largest, true);

  for (const int dtype : {NLC_FLOAT32, NLC_BFLOAT16, NLC_FLOAT16}) {
    for (const int n : {2, 4, 8}) {
      team.print("\n%-9s sum of %d   ", nlc::dtype_name(dtype), n);
      for (const nlc::Kernels *set : sets) team.print("%10s%10s", set->instruction_set, "streamed");
      team.print("%10s%10s\n", "in pairs", "copy");
      for (size_t size = size_t{4} << 10; size <= largest; size *= 8) {
        const size_t count = size / nlc::element_bytes(dtype), bytes = (n + 1) * size;
        const void *sources[most];
        for (int s = 0; s < n; ++s) sources[s] = arena + (s + 1) * size;
        team.print("%-22s", size_text(size).c_str());
        for (const nlc::Kernels *set : sets) {
          const nlc::Kernel kernel = set->of[dtype][NLC_SUM];
          for (const bool stream : {false, true}) {
            team.print("%10.1f", team.rate(bytes, [&] {
              kernel(sources, n, arena, count, 1.0, stream);
            }));
          }
        }
        team.print("%10.1f", team.rate(bytes, [&] {
          for (int s = 1; s < n; ++s) {
            const void *pair[] = {s == 1 ? sources[0] : arena, sources[s]};
            nlc::reduce(dtype, NLC_SUM, pair, 2, arena, count, 1.0, false);
          }
        }));
        team.print("%10.1f\n", team.rate(2 * size, [&] {
          nlc::copy(arena, sources[0], size, false);
        }));
      }
    }
  }
}

}  // namespace

int main(int count, char **words) {
  const std::string what = count > 1 ? words[1] : "";
  const int processes = count > 2 ? std::atoi(words[2]) : 1;
  if ((what != "copy" && what != "reduce") || processes < 1 || processes > kProcesses) {
    std::fprintf(stderr, "usage: kernels copy|reduce [processes, 1 to %d]\n", kProcesses);
    return 2;
  }
  Team team(processes);
  what == "copy" ? benchmark_copy(team) : benchmark_reduce(team);
}
