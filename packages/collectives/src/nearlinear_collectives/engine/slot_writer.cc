#include "slot_writer.h"

#include <algorithm>

#include "base.h"
#include "copy.h"

namespace nlc {
namespace {

constexpr size_t kStream = 32 << 10;  // bytes from which writing past the caches pays off
constexpr size_t kNear = 64 << 10;    // and up to which it does if neighbours share a cache
constexpr size_t kSample = 8 << 10;   // bytes written through the caches as a sample
constexpr int kRarely = 64;           // writes between samples, which take 2 % of the time at most
constexpr double kFar = 2;            // times slower than past the caches
constexpr double kForget = 1.02;      // decay of the fastest recent write past the caches

double copy_timed(void *to, const void *from, size_t bytes, bool stream) {
  const Clock::time_point begin = Clock::now();
  copy(to, from, bytes, stream);
  const std::chrono::duration<double, std::nano> took = Clock::now() - begin;
  return took.count() / static_cast<double>(bytes);
}

}  // namespace

void Nearness::took_past_caches(double nanoseconds) {
  past_caches_ = known() ? std::min(nanoseconds, past_caches_ * kForget) : nanoseconds;
}

void Nearness::took_through_caches(double nanoseconds) {
  misses_ = nanoseconds > kFar * past_caches_ ? misses_ + 1 : 0;
  near_ = misses_ < (near_ ? 2 : 1);
}

void SlotWriter::write(void *to, const void *from, size_t bytes) {
  if (bytes < kStream) return copy(to, from, bytes, false);
  if (!own_core_ || bytes < kNear) return copy(to, from, bytes, true);
  if (nearness_.near()) return nearness_.took_through_caches(copy_timed(to, from, bytes, false));
  size_t sample = 0;
  if (nearness_.known() && ++unmeasured_ >= kRarely) {
    unmeasured_ = 0;
    sample = kSample;
    nearness_.took_through_caches(copy_timed(to, from, sample, false));
  }
  nearness_.took_past_caches(copy_timed(static_cast<char *>(to) + sample,
                                        static_cast<const char *>(from) + sample, bytes - sample,
                                        true));
}

}  // namespace nlc
