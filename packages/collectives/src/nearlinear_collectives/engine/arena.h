// The memory pool of a process: one large shared mapping that ranks of the same node can read, so
// that collectives on tensors allocated from it need no staging.
//
// The mapping is sparse. A page costs memory from its first use and is then kept for reuse, because
// first touches cost more than the copies of a collective.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "peer_info.h"
#include "memory.h"

namespace nlc {

class Arena {
 public:
  static Arena &of_this_process();

  void *allocate(size_t bytes);  // nullptr when full
  void free(void *memory);

  // Offset of [memory, memory + bytes) in the arena, or -1 if it is not inside one block.
  int64_t offset_of(const void *memory, size_t bytes);
  bool contains(const void *memory) const;

  // Map the arena of a peer's process for reading; one mapping is shared by all groups.
  std::shared_ptr<Mapping> arena_of(const PeerInfo &peer);

  int fd() const { return fd_.get(); }
  size_t bytes() const { return pages_.bytes(); }
  const char *base() const { return pages_.base(); }

 private:
  struct Region {  // free ranges by offset, and by size for best fit
    std::map<uint64_t, uint64_t> by_offset;
    std::set<std::pair<uint64_t, uint64_t>> by_size;
    uint64_t granule;
    void add(uint64_t offset, uint64_t bytes);
    int64_t take(uint64_t bytes);
    void remove(std::map<uint64_t, uint64_t>::iterator range);
  };

  Arena();
  Region &region_of(uint64_t offset) { return offset < small_bytes_ ? small_ : large_; }

  Fd fd_;
  Mapping pages_;
  uint64_t small_bytes_;
  Region small_, large_;
  std::map<uint64_t, uint64_t> blocks_;  // in use: offset -> bytes
  std::map<std::pair<int, uint64_t>, std::weak_ptr<Mapping>> neighbours_;
  std::mutex mutex_;
};

// Temporary memory of a call: in the arena, where neighbours can read it, unless that is full.
class Scratch {
 public:
  explicit Scratch(size_t bytes);
  ~Scratch();
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;
  char *data() const { return data_; }

 private:
  char *data_;
  std::unique_ptr<char[]> own_;
};

}  // namespace nlc
