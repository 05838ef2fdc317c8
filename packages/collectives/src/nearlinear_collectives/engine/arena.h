// The pool of a process: one large shared memory that its neighbours on the node can read, so
// that collectives on tensors allocated from it need no staging.
//
// It is sparse: a page costs memory from its first use on. Blocks of 1 MiB and more start on a
// huge page.
//
// A block can also *borrow*: an all-gather into pool memory maps the neighbours' pages into the
// output instead of copying them (see borrow()). The mapping is copy-on-write on both sides, so
// the tensor behaves like private memory, and a lender's pages are not handed out again before
// every borrower has freed its block.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "card.h"
#include "memory.h"

namespace nlc {

// A neighbour's arena as seen from here.
struct LentArena {
  Fd fd;
  Mapping pages;  // read-only
  Mapping loans;  // read-write: how many borrowers each of its blocks has
};

// A part of a block that a neighbour lends, and where it shall appear here.
struct Loan {
  std::shared_ptr<LentArena> lender;  // nullptr: my own part, which I lend to the others
  uint64_t offset;                    // of the bytes in the lender's arena
  uint64_t block;                     // of their block in the lender's arena
  char *to;                           // in a block of this arena
};

class Arena {
 public:
  static Arena &of_this_process();

  void *allocate(size_t bytes);  // nullptr when full
  void free(void *memory);

  // Where memory lies in the arena. Nothing if [memory, memory + bytes) is not inside one block,
  // or in a block that borrows: a neighbour that read the arena there would see other bytes.
  struct Place {
    int64_t offset = -1;
    int64_t block = -1;
  };
  Place place_of(const void *memory, size_t bytes);
  bool contains(const void *memory) const;

  // Maps `bytes` of a lender's pages over this arena's memory, copy-on-write; the bytes at both
  // ends that fill no page are copied. The two places must lie alike within a page. One's own part
  // becomes copy-on-write where it is.
  void borrow(const Loan &loan, size_t bytes);

  // The arena of the process behind a card; one mapping per process, however many groups.
  std::shared_ptr<LentArena> arena_of(const Card &card);

  int fd() const { return fd_.get(); }
  int loans_fd() const { return loans_fd_.get(); }
  size_t bytes() const { return pages_.bytes(); }
  const char *base() const { return pages_.base(); }

 private:
  struct Block {
    size_t bytes;
    bool borrows = false;
    std::vector<std::atomic<uint32_t> *> debts;  // loans to give back when the block is freed
    std::vector<std::shared_ptr<LentArena>> lenders;
  };
  struct Region {  // free ranges by offset, and by size for the best fit
    std::map<uint64_t, uint64_t> by_offset;
    std::set<std::pair<uint64_t, uint64_t>> by_size;
    uint64_t granule;
    void add(uint64_t offset, uint64_t bytes);
    int64_t take(uint64_t bytes);
    void remove(std::map<uint64_t, uint64_t>::iterator range);
  };

  Arena();
  Region &region_of(uint64_t offset) { return offset < small_bytes_ ? small_ : large_; }
  void reclaim();  // blocks whose last borrower is gone
  void make_own(uint64_t offset, size_t bytes);

  Fd fd_, loans_fd_;
  Mapping pages_, loans_;
  uint64_t small_bytes_;
  Region small_, large_;
  std::map<uint64_t, Block> blocks_;
  std::map<uint64_t, size_t> waiting_;  // freed here, still lent to a neighbour
  std::map<std::pair<int, uint64_t>, std::weak_ptr<LentArena>> neighbours_;
  std::mutex mutex_;
};

}  // namespace nlc
