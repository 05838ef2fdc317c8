// Copies of any size between any addresses: plain, streamed, and into slots.
//
//   cd tests/collectives/engine &&
//   ENGINE=../../../packages/collectives/src/nearlinear_collectives/engine g++ -std=c++20 -g -O1
//   -Wall -Wextra -fsanitize=address,undefined -fno-sanitize-recover=all
//       -I$ENGINE copy_test.cc $ENGINE/{copy,slot_writer}.cc -o copy_test && ./copy_test
#include "copy.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "slot_writer.h"

namespace {

constexpr size_t kGuard = 200, kLargest = 300'000;
std::mt19937_64 random_bits(20240229);

// Bytes below the guards', to copy parts of.
const std::vector<unsigned char> kBytes = [] {
  std::vector<unsigned char> bytes(2 * kLargest);
  std::generate(bytes.begin(), bytes.end(), [] { return random_bits() & 0x7f; });
  return bytes;
}();

template <typename Copy>
void test_copy(size_t bytes, Copy copy) {
  const size_t from_offset = random_bits() % 130, to_offset = random_bits() % 130;
  // Blocks end where the source ends and slightly after the output, so a sanitizer checks the rest.
  std::unique_ptr<unsigned char[]> from(new unsigned char[from_offset + bytes]);
  std::unique_ptr<unsigned char[]> to(new unsigned char[to_offset + bytes + kGuard]);
  std::copy_n(kBytes.begin() + random_bits() % kLargest, bytes, from.get() + from_offset);
  std::fill_n(to.get(), to_offset + bytes + kGuard, 0xa5);
  copy(to.get() + to_offset, from.get() + from_offset, bytes);
  auto untouched = [](unsigned char byte) { return byte == 0xa5; };
  unsigned char *end = to.get() + to_offset + bytes;
  CHECK(std::equal(to.get() + to_offset, end, from.get() + from_offset));
  CHECK(std::all_of(to.get(), to.get() + to_offset, untouched));
  CHECK(std::all_of(end, end + kGuard, untouched));
}

void test_threshold() {
  size_t last = nlc::stream_threshold(1);
  for (int ranks = 2; ranks <= 1024; ranks *= 2) {
    const size_t threshold = nlc::stream_threshold(ranks);
    CHECK(threshold <= last && threshold > 0);
    last = threshold;
  }
  CHECK(nlc::stream_threshold(1) >= (256 << 10) && nlc::stream_threshold(1) <= (1 << 30));
  CHECK(last < nlc::stream_threshold(1));
}

void test_nearness() {
  nlc::Nearness nearness;
  CHECK(!nearness.known() && !nearness.near());
  nearness.took_past_caches(0.1);
  nearness.took_through_caches(0.3);
  CHECK(!nearness.near());
  nearness.took_through_caches(0.15);
  CHECK(nearness.near());
  nearness.took_through_caches(9);  // a single slow write is an interruption
  nearness.took_through_caches(0.1);
  CHECK(nearness.near());
  nearness.took_through_caches(0.3);
  nearness.took_through_caches(0.3);
  CHECK(!nearness.near());
  nearness.took_past_caches(0.05);  // the fastest counts; slower ones replace it gradually
  nearness.took_past_caches(1);
  nearness.took_through_caches(0.15);
  CHECK(!nearness.near());
  for (int i = 0; i < 200; ++i) nearness.took_past_caches(1);
  nearness.took_through_caches(0.15);
  CHECK(nearness.near());
}

}  // namespace

int main() {
  test_threshold();
  test_nearness();
  for (const bool own_core : {false, true}) {
    nlc::SlotWriter writer(own_core);
    for (int i = 0; i < 1000; ++i) {
      test_copy(random_bits() % kLargest,
                [&](void *to, const void *from, size_t n) { writer.write(to, from, n); });
    }
  }
  for (const bool stream : {false, true}) {
    const auto copy = [&](void *to, const void *from, size_t n) { nlc::copy(to, from, n, stream); };
    for (size_t bytes = 0; bytes < 300; ++bytes) test_copy(bytes, copy);
    for (size_t bytes = 4000; bytes < 4400; ++bytes) test_copy(bytes, copy);
    for (int i = 0; i < 500; ++i) test_copy(random_bits() % 100000, copy);
    nlc::copy(nullptr, nullptr, 0, stream);
  }
  std::printf("copy: ok\n");
}
