// Gather outputs that exist once per node: the part of rank j is rank j's own memory, mapped into
// the outputs of all its neighbours for good. A rank writes its part in place, and an all-gather is
// then a meeting: nothing is copied, and the gathered tensor takes its memory once, not once a
// rank.
//
// Outputs are handed out by number, the same number in the same order on all ranks (programs that
// train do that; if ranks disagree, the gather notices and copies). One that was freed is handed
// out again only when all neighbours have freed it too, for they may still be reading. Others'
// parts are read-only: writing there ends the process rather than another rank's data.
//
// Where a part begins or ends within a page, that page is private to each rank, and the few bytes
// are copied at the gather.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "memory.h"

namespace nlc {

constexpr size_t kSmallestShared = 32 << 10;  // bytes of a part; smaller ones are never shared

class SharedOutputs : public std::enable_shared_from_this<SharedOutputs> {
 public:
  // The memories of all ranks for their parts, in rank order. `released(number)` is called when an
  // output is freed, which may be after the group is gone.
  SharedOutputs(int rank, std::vector<Fd> memories, size_t capacity,
                std::function<void(int number)> released);

  // An output for parts of `bytes`, or nullptr if no more can be had. `may_reuse(number, times)`
  // says whether all neighbours have freed that output `times` times; it may wait.
  void *allocate(size_t bytes, const std::function<bool(int number, uint32_t times)> &may_reuse);
  static bool free(void *memory);

  // The output that begins at `memory` with parts of `bytes`, or -1. One that merely contains the
  // memory is about to be written by something else than its gather: it is made private.
  int number_of(const void *memory, size_t bytes);

  void publish_edges(int number);  // my part's, before the meeting
  void fetch_edges(int number);    // the others', after it
  void make_private(int number);   // plain memory with the same content from now on

 private:
  struct Output {
    char *base = nullptr;
    size_t bytes = 0;     // of a part
    uint64_t offset = 0;  // in every rank's memory
    uint32_t times = 0;   // handed out
    bool in_use = false;
    bool is_private = false;
    Mapping mapping;
  };
  struct Part {  // of rank j in an output: its bytes, and the pages that are wholly its own
    size_t begin, end, first_page, end_page;
  };
  Part part(const Output &output, int rank) const;
  void map(Output &output);
  template <typename Visit>
  void at_edges(const Part &part, Visit visit) const;

  const int rank_;
  const int pid_;
  std::vector<Fd> memories_;
  std::vector<Mapping> edges_;  // all ranks' memories as a whole, for the few bytes at the edges
  uint64_t next_offset_ = 0;
  const size_t capacity_;
  const std::function<void(int)> released_;
  std::vector<Output> outputs_;
  std::mutex mutex_;
};

}  // namespace nlc
