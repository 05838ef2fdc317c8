// Copies into slots of shared memory that neighbours have read before and will read again.
//
// A store through the caches first takes the line back from the core that read it last. That is
// cheap if the two cores share a cache, and the reader then finds the data close by. Otherwise
// (another core complex or socket) it costs a quarter of a microsecond per line, four times as much
// as writing past the caches. Hypervisors move cores around, so the choice is measured at run time.
#pragma once

#include <cstddef>

namespace nlc {

// Update the choice from the nanoseconds per byte of a write.
class Nearness {
 public:
  bool near() const { return near_; }
  bool known() const { return past_caches_ > 0; }  // true if there is a reference to compare with
  void took_past_caches(double nanoseconds);
  void took_through_caches(double nanoseconds);

 private:
  bool near_ = false;
  int misses_ = 0;  // consecutive writes as slow as to a distant neighbour
  double past_caches_ = 0;
};

class SlotWriter {
 public:
  // Ranks that share a core would measure each other's time slices, and find little in its cache.
  explicit SlotWriter(bool own_core = false) : own_core_(own_core) {}

  void write(void *to, const void *from, size_t bytes);

 private:
  bool own_core_;
  Nearness nearness_;
  int unmeasured_ = 0;
};

}  // namespace nlc
