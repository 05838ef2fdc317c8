#include "arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace nlc {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHuge = uint64_t{2} << 20;
constexpr uint64_t kLarge = uint64_t{1} << 20;  // blocks from here on start on a huge page

uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

uint64_t arena_size() {
  const int64_t wanted = setting_number("POOL_MIB", 0);
  if (wanted > 0) return round_up(static_cast<uint64_t>(wanted) << 20, kHuge);
  const uint64_t memory = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                          static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return round_up(memory, kHuge);
}

size_t loans_size(uint64_t arena_bytes) { return round_up(arena_bytes / kPage * 4, kPage); }

std::atomic<uint32_t> &loans_in(const Mapping &loans, uint64_t offset) {
  return reinterpret_cast<std::atomic<uint32_t> *>(loans.base())[offset / kPage];
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
  const uint64_t bytes = arena_size();
  fd_ = make_memory("nearlinear-pool", bytes);
  pages_ = map_memory(fd_.get(), bytes, true);
  loans_fd_ = make_memory("nearlinear-loans", loans_size(bytes));
  loans_ = map_memory(loans_fd_.get(), loans_size(bytes), true);
  small_bytes_ = round_up(bytes / 16, kHuge);
  small_.granule = kPage;
  large_.granule = kHuge;
  small_.add(0, small_bytes_);
  large_.add(small_bytes_, bytes - small_bytes_);
}

Arena &Arena::of_this_process() {
  static Arena *arena = new Arena();  // never destroyed: tensors may outlive everything else
  return *arena;
}

void *Arena::allocate(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!waiting_.empty()) reclaim();
  Region &region = bytes >= kLarge ? large_ : small_;
  const uint64_t size = round_up(std::max<uint64_t>(bytes, 1), region.granule);
  const int64_t offset = region.take(size);
  if (offset < 0) return nullptr;
  blocks_[static_cast<uint64_t>(offset)] = Block{size, false, {}, {}};
  return pages_.base() + offset;
}

void Arena::free(void *memory) {
  if (!memory) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = blocks_.find(static_cast<uint64_t>(static_cast<char *>(memory) - pages_.base()));
  if (found == blocks_.end()) return;
  const auto [offset, block] = std::move(*found);
  blocks_.erase(found);
  if (block.borrows) make_own(offset, block.bytes);
  for (std::atomic<uint32_t> *debt : block.debts) debt->fetch_sub(1, std::memory_order_acq_rel);
  if (loans_in(loans_, offset).load(std::memory_order_acquire))
    waiting_[offset] = block.bytes;
  else
    region_of(offset).add(offset, block.bytes);
}

void Arena::reclaim() {
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (loans_in(loans_, it->first).load(std::memory_order_acquire) == 0) {
      region_of(it->first).add(it->first, it->second);
      it = waiting_.erase(it);
    } else {
      ++it;
    }
  }
}

void Arena::make_own(uint64_t offset, size_t bytes) {
  char *at = pages_.base() + offset;
  if (mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_.get(),
           static_cast<off_t>(offset)) == MAP_FAILED)
    throw system_failure("cannot map the pool's own pages back");
  madvise(at, bytes, MADV_HUGEPAGE);
}

bool Arena::contains(const void *memory) const {
  const char *at = static_cast<const char *>(memory);
  return at >= pages_.base() && at < pages_.base() + pages_.bytes();
}

Arena::Place Arena::place_of(const void *memory, size_t bytes) {
  if (!contains(memory)) return {};
  const uint64_t offset = static_cast<uint64_t>(static_cast<const char *>(memory) - pages_.base());
  const std::lock_guard<std::mutex> lock(mutex_);
  auto after = blocks_.upper_bound(offset);
  if (after == blocks_.begin()) return {};
  const auto &[start, block] = *std::prev(after);
  if (block.borrows || offset + bytes > start + block.bytes) return {};
  return {static_cast<int64_t>(offset), static_cast<int64_t>(start)};
}

void Arena::borrow(const Loan &loan, size_t bytes) {
  const uint64_t start = static_cast<uint64_t>(loan.to - pages_.base());
  const uint64_t first = round_up(start, kPage), end = (start + bytes) / kPage * kPage;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Block &block = std::prev(blocks_.upper_bound(start))->second;
    block.borrows = true;
    if (loan.lender) {
      std::atomic<uint32_t> &debt = loans_in(loan.lender->loans, loan.block);
      debt.fetch_add(1, std::memory_order_acq_rel);
      block.debts.push_back(&debt);
      block.lenders.push_back(loan.lender);
    }
  }
  const uint64_t from = loan.offset + (first - start);
  if (end > first && mmap(pages_.base() + first, end - first, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_FIXED, loan.lender ? loan.lender->fd.get() : fd_.get(),
                          static_cast<off_t>(from)) == MAP_FAILED)
    throw system_failure("cannot map a neighbour's pages");
  if (!loan.lender) return;
  const char *lent = loan.lender->pages.base() + loan.offset;
  const size_t head = std::min<size_t>(first - start, bytes);
  std::memcpy(loan.to, lent, head);
  if (end >= first) std::memcpy(pages_.base() + end, lent + (end - start), start + bytes - end);
}

std::shared_ptr<LentArena> Arena::arena_of(const Card &card) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::weak_ptr<LentArena> &known = neighbours_[{card.pid, card.started}];
  if (auto arena = known.lock()) return arena;
  auto arena = std::make_shared<LentArena>();
  arena->fd = open_memory_of(card.pid, card.arena_fd);
  arena->pages = map_memory(arena->fd.get(), card.arena_bytes, false);
  const Fd loans = open_memory_of(card.pid, card.loans_fd);
  arena->loans = map_memory(loans.get(), loans_size(card.arena_bytes), true);
  known = arena;
  return arena;
}

}  // namespace nlc
