#include "shared_output.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "segment.h"

namespace nlc {
namespace {

constexpr size_t kPage = 4096;

size_t up(size_t value) { return (value + kPage - 1) / kPage * kPage; }
size_t down(size_t value) { return value / kPage * kPage; }

// The group outputs that a tensor belongs to, for free(); keeps them alive.
std::mutex in_use_mutex;
std::map<const void *, std::shared_ptr<SharedOutputs>> &in_use() {
  static auto *outputs = new std::map<const void *, std::shared_ptr<SharedOutputs>>();
  return *outputs;
}

}  // namespace

SharedOutputs::SharedOutputs(int rank, std::vector<Fd> memories, size_t capacity,
                             std::function<void(int)> released)
    : rank_(rank),
      pid_(getpid()),
      memories_(std::move(memories)),
      capacity_(capacity),
      released_(std::move(released)) {
  for (size_t r = 0; r < memories_.size(); ++r)
    edges_.push_back(map_memory(memories_[r].get(), capacity, static_cast<int>(r) == rank));
}

SharedOutputs::Part SharedOutputs::part(const Output &output, int rank) const {
  const size_t begin = static_cast<size_t>(rank) * output.bytes, end = begin + output.bytes;
  const size_t first = up(begin), last = down(end);
  return {begin, end, std::min(first, std::max(last, first)), std::max(first, last)};
}

void SharedOutputs::map(Output &output) {
  const size_t whole = up(output.bytes * memories_.size());
  void *room = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) throw system_failure("cannot reserve memory for a shared output");
  output.mapping = Mapping(room, whole);
  output.base = static_cast<char *>(room);
  for (size_t r = 0; r < memories_.size(); ++r) {
    const Part pages = part(output, static_cast<int>(r));
    if (pages.end_page == pages.first_page) continue;
    const bool mine = static_cast<int>(r) == rank_;
    if (mmap(output.base + pages.first_page, pages.end_page - pages.first_page,
             mine ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED | MAP_FIXED, memories_[r].get(),
             static_cast<off_t>(output.offset + pages.first_page)) == MAP_FAILED)
      throw system_failure("cannot map a shared output");
  }
}

void *SharedOutputs::allocate(size_t bytes,
                              const std::function<bool(int number, uint32_t times)> &may_reuse) {
  std::unique_lock<std::mutex> lock(mutex_);
  size_t number = 0;
  while (number < outputs_.size() && (outputs_[number].in_use || outputs_[number].is_private ||
                                      outputs_[number].bytes != bytes))
    ++number;
  if (number == outputs_.size()) {
    Output fresh;
    fresh.bytes = bytes;
    fresh.offset = next_offset_;
    const uint64_t end = next_offset_ + up(bytes * memories_.size());
    if (end > capacity_ || number >= kSharedOutputs) return nullptr;
    map(fresh);
    next_offset_ = end;
    outputs_.push_back(std::move(fresh));
  } else {
    const uint32_t times = outputs_[number].times;
    lock.unlock();
    if (!may_reuse(static_cast<int>(number), times)) return nullptr;
    lock.lock();
  }
  Output &output = outputs_[number];
  output.in_use = true;
  ++output.times;
  const std::lock_guard<std::mutex> registry(in_use_mutex);
  in_use()[output.base] = shared_from_this();
  return output.base;
}

bool SharedOutputs::free(void *memory) {
  std::shared_ptr<SharedOutputs> owner;
  {
    const std::lock_guard<std::mutex> registry(in_use_mutex);
    const auto found = in_use().find(memory);
    if (found == in_use().end()) return false;
    owner = std::move(found->second);
    in_use().erase(found);
  }
  if (owner->pid_ != getpid()) return true;  // a tensor's copy in a forked child
  const std::lock_guard<std::mutex> lock(owner->mutex_);
  for (size_t i = 0; i < owner->outputs_.size(); ++i) {
    Output &output = owner->outputs_[i];
    if (output.base != memory) continue;
    output.in_use = false;
    if (output.is_private) output.base = nullptr, output.mapping = Mapping();
    owner->released_(static_cast<int>(i));
    break;
  }
  return true;
}

int SharedOutputs::number_of(const void *memory, size_t bytes) {
  const char *at = static_cast<const char *>(memory);
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const Output &output = outputs_[i];
    if (!output.in_use || output.is_private) continue;
    if (output.base == at && output.bytes == bytes) return static_cast<int>(i);
    if (at >= output.base && at < output.base + output.mapping.bytes())
      make_private(static_cast<int>(i));
  }
  return -1;
}

template <typename Visit>
void SharedOutputs::at_edges(const Part &part, Visit visit) const {
  if (part.first_page >= part.end_page) return visit(part.begin, part.end - part.begin);
  visit(part.begin, part.first_page - part.begin);
  visit(part.end_page, part.end - part.end_page);
}

void SharedOutputs::publish_edges(int number) {
  const Output &output = outputs_[static_cast<size_t>(number)];
  char *memory = edges_[static_cast<size_t>(rank_)].base() + output.offset;
  at_edges(part(output, rank_),
           [&](size_t at, size_t bytes) { std::memcpy(memory + at, output.base + at, bytes); });
}

void SharedOutputs::fetch_edges(int number) {
  const Output &output = outputs_[static_cast<size_t>(number)];
  for (size_t r = 0; r < memories_.size(); ++r) {
    if (static_cast<int>(r) == rank_) continue;
    const char *memory = edges_[r].base() + output.offset;
    at_edges(part(output, static_cast<int>(r)),
             [&](size_t at, size_t bytes) { std::memcpy(output.base + at, memory + at, bytes); });
  }
}

void SharedOutputs::make_private(int number) {
  Output &output = outputs_[static_cast<size_t>(number)];
  const std::vector<char> kept(output.base, output.base + output.mapping.bytes());
  if (mmap(output.base, output.mapping.bytes(), PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
    throw system_failure("cannot make a shared output private");
  std::memcpy(output.base, kept.data(), kept.size());
  const std::lock_guard<std::mutex> lock(mutex_);
  output.is_private = true;
}

}  // namespace nlc
