// Shared memory without names: a memfd of one process that its neighbours open through /proc.
//
// Nothing is in /dev/shm, so a killed process leaves nothing behind and the 64 MiB limit of a
// container's /dev/shm does not apply.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

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

// Mappings of this process by the nonce of their rank. Ranks that are threads share them: a second
// mapping would hide every race from a thread sanitizer.
class MappingsHere {
 public:
  // Return the mapping of a nonce, made by make() if there is none.
  template <class Make>
  std::shared_ptr<Mapping> get(uint64_t nonce, Make make) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<Mapping> found = known_[nonce].lock();
    if (!found) known_[nonce] = found = make();
    return found;
  }
  std::shared_ptr<Mapping> find(uint64_t nonce) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(nonce);
    return found == known_.end() ? nullptr : found->second.lock();
  }
  void forget(uint64_t nonce) {
    const std::lock_guard<std::mutex> lock(mutex_);
    known_.erase(nonce);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::weak_ptr<Mapping>> known_;
};

Fd make_memory(const char *name, size_t bytes);

// Map a shared memory from `offset`, at a multiple of 2 MiB, and request huge pages.
Mapping map_memory(int fd, size_t bytes, bool writable, size_t offset = 0);

// Open the memory or pipe `fd` of another process of this user on this node. Throws NLC_PEER_DIED
// if the process is gone.
Fd open_memory_of(int pid, int fd);

}  // namespace nlc
