// Gather outputs that exist once per node: the part of rank j is rank j's own memory, mapped
// permanently into the outputs of all its neighbours. A rank writes its part in place, so an
// all-gather is only a barrier: nothing is copied, and the gathered tensor takes its memory once
// per node instead of once per rank.
//
// Outputs are numbered in the same order on all ranks. (Training programs allocate in the same
// order; if ranks disagree, the gather detects it and copies.) A freed output is reused only after
// all neighbours have freed it, because they may still be reading. Neighbours' parts are read-only:
// writing to one ends the process instead of corrupting another rank's data.
//
// A page in which two parts meet is private to each rank; its few bytes are copied at the gather.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "memory.h"

namespace nlc {

constexpr size_t kSmallestShared = 32 << 10;  // bytes of a part; smaller parts are not shared

class SharedOutputs : public std::enable_shared_from_this<SharedOutputs> {
 public:
  // `memories` holds all ranks' memory for their parts, in rank order. `released(number)` is called
  // when an output is freed, which may be after the group is gone.
  SharedOutputs(int rank, std::vector<Fd> memories, size_t capacity,
                std::function<void(int number)> released);

  // Allocate an output for parts of `bytes`; nullptr if there are no more. `may_reuse(number,
  // times)` returns true if all neighbours have freed that output `times` times; it may wait.
  void *allocate(size_t bytes, const std::function<bool(int number, uint32_t times)> &may_reuse);
  static bool free(void *memory);

  // Return the output that begins at `memory` with parts of `bytes`, or -1. An output that merely
  // contains the memory is about to be written by another operation and is made private.
  int number_of(const void *memory, size_t bytes);

  void publish_edges(int number);  // of this rank's part, before the barrier
  void fetch_edges(int number);    // of the neighbours' parts, after the barrier
  void make_private(int number);   // convert to ordinary memory with the same content

 private:
  struct Output {
    char *base = nullptr;
    size_t bytes = 0;     // of a part
    uint64_t offset = 0;  // in every rank's memory
    uint32_t times = 0;   // number of times it was allocated
    bool in_use = false;
    bool is_private = false;
    Mapping mapping;
  };
  struct Part {  // part of rank j in an output: its bytes, and the pages wholly inside it
    size_t begin, end, first_page, end_page;
  };
  Part part(const Output &output, int rank) const;
  void map(Output &output);
  template <typename Visit>
  void at_edges(const Part &part, Visit visit) const;

  const int rank_;
  const int pid_;
  std::vector<Fd> memories_;
  std::vector<Mapping> edges_;  // full mappings of all ranks' memory, for the bytes at the edges
  uint64_t next_offset_ = 0;
  const size_t capacity_;
  const std::function<void(int)> released_;
  std::vector<Output> outputs_;
  std::mutex mutex_;
};

}  // namespace nlc
