#include "arena.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace nlc {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHuge = uint64_t{2} << 20;
constexpr uint64_t kSmallestArena = uint64_t{64} << 20;
constexpr uint64_t kAddressSpace = uint64_t{1} << 47;  // of a process on x86_64 and aarch64
constexpr uint64_t kLarge = uint64_t{1} << 20;  // blocks of at least this size start on a huge page

uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

// Ranks of this machine as the launcher states them, or the number of its cores.
uint64_t ranks_of_machine() {
  for (const char *name : {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"}) {
    const char *text = std::getenv(name);
    if (const long count = text ? std::atol(text) : 0; count > 0)
      return static_cast<uint64_t>(count);
  }
  return static_cast<uint64_t>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
}

// Bytes of address space that this process may use.
uint64_t address_space() {
  rlimit limit{};
  const bool limited = getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return limited ? std::min<uint64_t>(limit.rlim_cur, kAddressSpace) : kAddressSpace;
}

// Every rank maps the pools of all ranks of its machine, and as much again for the shared outputs
// of each group that has some. The pools together take an eighth of the address space at most.
uint64_t arena_size() {
  const int64_t wanted = setting_number("POOL_MIB", 0);
  if (wanted > 0) return round_up(static_cast<uint64_t>(wanted) << 20, kHuge);
  const uint64_t memory =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t share = address_space() / 8 / (ranks_of_machine() + 1);
  return round_up(std::max(std::min(memory, share), kSmallestArena), kHuge);
}

}  // namespace

void Arena::Region::add(uint64_t offset, uint64_t bytes) {
  auto after = by_offset.lower_bound(offset);
  if (after != by_offset.end() && offset + bytes == after->first) {
    bytes += after->second;
    const auto joined = after++;
    remove(joined);
  }
  if (after != by_offset.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      remove(before);
    }
  }
  by_offset[offset] = bytes;
  by_size.insert({bytes, offset});
}

void Arena::Region::remove(std::map<uint64_t, uint64_t>::iterator range) {
  by_size.erase({range->second, range->first});
  by_offset.erase(range);
}

int64_t Arena::Region::take(uint64_t bytes) {
  const auto fit = by_size.lower_bound({bytes, 0});
  if (fit == by_size.end()) return -1;
  const auto [available, offset] = *fit;
  remove(by_offset.find(offset));
  if (available > bytes) {
    by_offset[offset + bytes] = available - bytes;
    by_size.insert({available - bytes, offset + bytes});
  }
  return static_cast<int64_t>(offset);
}

Arena::Arena() {
  uint64_t bytes = arena_size();
  for (;; bytes = round_up(bytes / 2, kHuge)) {
    fd_ = make_memory("nearlinear-pool", bytes);
    try {
      pages_ = map_memory(fd_.get(), bytes, true);
      break;
    } catch (const Failure &) {  // other mappings have taken the address space
      if (bytes <= kSmallestArena) throw;
    }
  }
  small_bytes_ = round_up(bytes / 16, kHuge);
  small_.granule = kPage;
  large_.granule = kHuge;
  small_.add(0, small_bytes_);
  large_.add(small_bytes_, bytes - small_bytes_);
}

Arena &Arena::of_this_process() {
  // Never destroyed, because tensors may outlive static objects. A forked child gets an arena of
  // its own and does not touch the inherited memory.
  static std::mutex mutex;
  static Arena *arena = nullptr;
  static int owner = 0;
  static const int registered =
      pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  (void)registered;
  const std::lock_guard<std::mutex> lock(mutex);
  if (owner != getpid()) arena = new Arena(), owner = getpid();
  return *arena;
}

void *Arena::allocate(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Region &region = bytes >= kLarge ? large_ : small_;
  const uint64_t size = round_up(std::max<uint64_t>(bytes, 1), region.granule);
  const int64_t offset = region.take(size);
  if (offset < 0) return nullptr;
  blocks_[static_cast<uint64_t>(offset)] = size;
  return pages_.base() + offset;
}

void Arena::free(void *memory) {
  if (!contains(memory)) return;  // null, or a block of the parent process
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found =
      blocks_.find(static_cast<uint64_t>(static_cast<char *>(memory) - pages_.base()));
  if (found == blocks_.end()) return;
  const auto [offset, bytes] = *found;
  blocks_.erase(found);
  region_of(offset).add(offset, bytes);
}

bool Arena::contains(const void *memory) const {
  const char *at = static_cast<const char *>(memory);
  return at >= pages_.base() && at < pages_.base() + pages_.bytes();
}

int64_t Arena::offset_of(const void *memory, size_t bytes) {
  if (!contains(memory)) return -1;
  const uint64_t offset = static_cast<uint64_t>(static_cast<const char *>(memory) - pages_.base());
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto after = blocks_.upper_bound(offset);
  if (after == blocks_.begin()) return -1;
  const auto &[start, size] = *std::prev(after);
  return offset + bytes <= start + size ? static_cast<int64_t>(offset) : -1;
}

std::shared_ptr<Mapping> Arena::arena_of(const PeerInfo &peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::weak_ptr<Mapping> &known = neighbours_[{peer.pid, peer.started}];
  if (auto pages = known.lock()) return pages;
  const Fd fd = open_memory_of(peer.pid, peer.arena_fd);
  auto pages = std::make_shared<Mapping>(map_memory(fd.get(), peer.arena_bytes, false));
  known = pages;
  return pages;
}

Scratch::Scratch(size_t bytes)
    : data_(static_cast<char *>(bytes ? Arena::of_this_process().allocate(bytes) : nullptr)) {
  if (data_ || !bytes) return;
  own_ = std::make_unique<char[]>(bytes);
  data_ = own_.get();
}

Scratch::~Scratch() {
  if (data_ && !own_) Arena::of_this_process().free(data_);
}

}  // namespace nlc
