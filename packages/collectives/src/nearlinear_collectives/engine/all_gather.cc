// All-gather: through shared memory on one node, with node_all_gather() between nodes.
#include <algorithm>

#include "copy.h"
#include "local.h"
#include "nodes.h"
#include "reduce.h"

namespace nlc {
namespace {

// Up to this size, one staged step is faster than finding out where every rank's memory is.
constexpr size_t kSmall = kSmallestShared;
void staged(Group &group, const char *input, const PartOf &part, size_t bytes, bool stream,
            bool compare) {
  const int here = group.ranks_here(), me = group.topology().local;
  const size_t chunk = group.chunk_bytes();
  const uint32_t steps = static_cast<uint32_t>(std::max<size_t>(1, (bytes + chunk - 1) / chunk));
  const uint32_t first = group.take_steps(kInputs, steps);
  const auto size_of = [&](uint32_t s) {
    return std::min(chunk, bytes - std::min(bytes, s * chunk));
  };
  uint32_t posted = 0;
  for (uint32_t s = 0; s < steps; ++s) {
    for (; posted < std::min(steps, s + 2); ++posted) {  // one step ahead of the readers
      group.await_free(kInputs, first + posted);
      group.slots.write(group.mine().slot(kInputs, first + posted), input + posted * chunk,
                        size_of(posted));
      group.post(kInputs, first + posted);
    }
    const size_t offset = s * chunk, n = size_of(s);
    if (part(me) != input) copy(part(me) + offset, input + offset, n, stream);
    for (int i = 1; i < here; ++i) {
      const int other = (me + i) % here;
      group.await_post(kInputs, first + s, other);
      if (compare && s == 0) group.compare_call(other);
      copy(part(other) + offset, group.neighbour(other).segment->slot(kInputs, first + s), n,
           stream);
    }
    group.consume(kInputs, first + s);
  }
}

// Return true if every rank gathers into the same shared output.
bool all_share(Group &group, int number) {
  for (int i = 0; i < group.ranks_here(); ++i)
    if (group.call_of(i).shared != number) return false;
  return number >= 0;
}

}  // namespace

void local_all_gather(Group &group, const nlc_call &call, const char *input, const PartOf &part,
                      size_t bytes, bool stream) {
  const int here = group.ranks_here(), me = group.topology().local;
  if (here == 1) {
    if (part(0) != input) copy(part(0), input, bytes, stream);
    return;
  }
  if (bytes <= kSmall) {
    group.path = "staged";
    return staged(group, input, part, bytes, stream, true);
  }
  const int shared = group.outputs() ? group.outputs()->number_of(call.output, bytes) : -1;
  const char *own = input;
  if (input != part(me) &&
      (shared >= 0 || Arena::of_this_process().offset_of(part(me), bytes) >= 0)) {
    // The output needs it anyway, and neighbours can read it there.
    copy(part(me), input, bytes, false);
    own = part(me);
  }
  const uint32_t step = group.take_steps(kInputs, 1);
  group.publish_input(own, bytes);
  if (shared >= 0) {
    group.publish_shared(shared);
    group.outputs()->publish_edges(shared);
  }
  meet(group, step);
  if (all_share(group, shared)) {
    group.path = "shared";
    group.outputs()->fetch_edges(shared);
    return group.consume(kInputs, step);
  }
  if (shared >= 0) group.outputs()->make_private(shared);
  const bool readable = all_pooled(group);
  if (readable) {
    group.path = "pulled";
    for (int i = 1; i < here; ++i) {
      const int other = (me + i) % here;
      copy(part(other), group.neighbour(other).memory + group.call_of(other).input, bytes, stream);
    }
    if (own != part(me)) copy(part(me), own, bytes, stream);
  }
  group.consume(kInputs, step);
  if (readable) return group.await_all(kInputs, step);
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
  if (group.topology().node_count() > 1) return node_all_gather(group, call, part, bytes, stream);
  const auto &ranks = group.topology().neighbours();
  local_all_gather(
      group, call, static_cast<const char *>(call.input),
      [&](int local) { return part(ranks[static_cast<size_t>(local)]); }, bytes, stream);
}

}  // namespace nlc
