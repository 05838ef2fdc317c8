// All-gather: on one node through its memory, between nodes through node_all_gather().
#include <algorithm>

#include "copy.h"
#include "local.h"
#include "nodes.h"
#include "reduce.h"

namespace nlc {
namespace {

// Below this, one staged step is faster than finding out where everybody's memory lies.
constexpr size_t kSmall = 32 << 10;
// From here on, mapping pages is faster than copying them.
constexpr size_t kBorrow = 1 << 20;

void staged(Group &group, const char *input, const PartOf &part, size_t bytes, bool stream,
            bool compare) {
  const int here = group.ranks_here(), me = group.place().local;
  const size_t chunk = group.chunk_bytes();
  const uint32_t steps = static_cast<uint32_t>(std::max<size_t>(1, (bytes + chunk - 1) / chunk));
  const uint32_t first = group.take_steps(kInputs, steps);
  const auto size_of = [&](uint32_t s) { return std::min(chunk, bytes - std::min(bytes, s * chunk)); };
  uint32_t posted = 0;
  for (uint32_t s = 0; s < steps; ++s) {
    for (; posted < std::min(steps, s + 2); ++posted) {  // one ahead of what is read
      group.await_free(kInputs, first + posted);
      copy(group.mine().slot(kInputs, first + posted), input + posted * chunk, size_of(posted), false);
      group.post(kInputs, first + posted);
    }
    const size_t offset = s * chunk, n = size_of(s);
    if (part(me) != input) copy(part(me) + offset, input + offset, n, stream);
    for (int i = 1; i < here; ++i) {
      const int other = (me + i) % here;
      group.await_post(kInputs, first + s, other);
      if (compare && s == 0) group.compare_call(other);
      copy(part(other) + offset, group.neighbour(other).segment->slot(kInputs, first + s), n, stream);
    }
    group.consume(kInputs, first + s);
  }
}

// Whether every output lies in a pool, laid out as a whole, so that pages can be shared.
bool can_borrow(Group &group, size_t bytes) {
  if (bytes < kBorrow) return false;
  for (int i = 0; i < group.ranks_here(); ++i) {
    const CallCard &call = group.call_of(i);
    const int64_t own_part = static_cast<int64_t>(bytes) * group.neighbour(i).rank;
    if (call.block < 0 || call.input != call.output + own_part) return false;
    if (i != group.place().local && !group.neighbour(i).pool) return false;
    if ((call.output - group.call_of(0).output) % 4096 != 0) return false;
  }
  return true;
}

void borrow(Group &group, const PartOf &part, size_t bytes) {
  for (int i = 0; i < group.ranks_here(); ++i) {
    const CallCard &call = group.call_of(i);
    Arena::of_this_process().borrow({group.neighbour(i).pool, static_cast<uint64_t>(call.input),
                                     static_cast<uint64_t>(call.block), part(i)}, bytes);
  }
}

}  // namespace

void local_all_gather(Group &group, const nlc_call &call, const char *input, const PartOf &part,
                      size_t bytes, bool stream) {
  const int here = group.ranks_here(), me = group.place().local;
  if (here == 1) {
    if (part(0) != input) copy(part(0), input, bytes, stream);
    return;
  }
  if (bytes <= kSmall) {
    group.path = "staged";
    return staged(group, input, part, bytes, stream, true);
  }
  const char *own = input;
  if (input != part(me) && Arena::of_this_process().place_of(part(me), bytes).offset >= 0) {
    copy(part(me), input, bytes, false);  // needed there anyway, and neighbours can read it there
    own = part(me);
  }
  const uint32_t step = group.take_steps(kInputs, 1);
  group.publish_places(own, bytes, static_cast<const char *>(call.output),
                       bytes * static_cast<size_t>(group.size()));
  meet(group, step);
  bool readable = true;
  for (int i = 0; i < here; ++i) readable = readable && group.call_of(i).input >= 0;
  const bool borrows = group.place().node_count() == 1 && can_borrow(group, bytes);
  if (borrows) {
    group.path = "borrowed";
    borrow(group, part, bytes);
  } else if (readable) {
    group.path = "pulled";
    for (int i = 1; i < here; ++i) {
      const int other = (me + i) % here;
      copy(part(other), group.neighbour(other).memory + group.call_of(other).input, bytes, stream);
    }
    if (own != part(me)) copy(part(me), own, bytes, stream);
  }
  group.consume(kInputs, step);
  if (borrows || readable) return group.await_all(kInputs, step);
  group.path = "staged";
  staged(group, own, part, bytes, stream, false);
}

void all_gather(Group &group, const nlc_call &call) {
  const size_t bytes = call.count * element_bytes(call.dtype);
  const auto part = [&](int rank) {
    return call.outputs ? static_cast<char *>(call.outputs[rank])
                        : static_cast<char *>(call.output) + bytes * static_cast<size_t>(rank);
  };
  const bool stream = bytes * static_cast<size_t>(group.size()) >= group.stream_bytes();
  if (group.place().node_count() > 1) return node_all_gather(group, call, part, bytes, stream);
  const auto &ranks = group.place().neighbours();
  local_all_gather(group, call, static_cast<const char *>(call.input),
                   [&](int local) { return part(ranks[static_cast<size_t>(local)]); }, bytes, stream);
}

}  // namespace nlc
