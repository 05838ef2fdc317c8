// Shared memory without names: a memfd of one process that its neighbours open through /proc.
//
// Nothing ever lies in /dev/shm, so nothing is left there by a killed process and the 64 MiB of a
// container's /dev/shm do not matter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base.h"

namespace nlc {

class Mapping {
 public:
  Mapping() = default;
  Mapping(void *base, size_t bytes) : base_(static_cast<char *>(base)), bytes_(bytes) {}
  Mapping(Mapping &&other) noexcept { *this = std::move(other); }
  Mapping &operator=(Mapping &&other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping();
  char *base() const { return base_; }
  size_t bytes() const { return bytes_; }

 private:
  char *base_ = nullptr;
  size_t bytes_ = 0;
};

Fd make_memory(const char *name, size_t bytes);

// Maps a shared memory from its start, at an address that is a multiple of 2 MiB, and asks for
// huge pages where the system has them.
Mapping map_memory(int fd, size_t bytes, bool writable);

// The memory or pipe `fd` of another process of this user on this node. Throws NLC_PEER_DIED if it
// is gone.
Fd open_memory_of(int pid, int fd);

}  // namespace nlc
