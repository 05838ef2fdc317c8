// Copies into slots of shared memory that neighbours have read before and will read again.
//
// A store through the caches first takes the line back from the core that read it last. Where the
// two share a cache that is cheap, and the reader then finds the data close by; elsewhere (another
// core complex or socket) it costs a quarter of a microsecond a line, four times what going past
// the caches does. Hypervisors move cores about, so which of the two holds is measured on the way.
#pragma once

#include <cstddef>

namespace nlc {

// Which of the two it is, from what a byte took in nanoseconds.
class Nearness {
 public:
  bool near() const { return near_; }
  bool known() const { return past_caches_ > 0; }  // whether there is something to compare with
  void took_past_caches(double nanoseconds);
  void took_through_caches(double nanoseconds);

 private:
  bool near_ = false;
  int misses_ = 0;  // writes in a row that were as slow as if neighbours were far
  double past_caches_ = 0;
};

class SlotWriter {
 public:
  // Ranks that take turns on a core measure each other's turns, and find little in its cache.
  explicit SlotWriter(bool own_core = false) : own_core_(own_core) {}

  void write(void *to, const void *from, size_t bytes);

 private:
  bool own_core_;
  Nearness nearness_;
  int unmeasured_ = 0;
};

}  // namespace nlc
