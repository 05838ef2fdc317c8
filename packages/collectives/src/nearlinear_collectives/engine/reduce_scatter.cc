// Reduce-scatter: rank r gets the reduction, in rank order, of all ranks' r-th parts.
#include <algorithm>
#include <vector>

#include "copy.h"
#include "local.h"
#include "nodes.h"
#include "reduce.h"

namespace nlc {
namespace {

constexpr size_t kSmall = 32 << 10;
constexpr size_t kPulledBlock = 256 << 10;  // output bytes at a time, so that sources are read once

struct Parts {
  Group &group;
  const char *input;
  char *output;
  size_t element, count;  // bytes per element, elements per rank
  int dtype, reduce_op;
  double scale;
  bool stream;

  const char *mine_for(int local, size_t first) const {
    const size_t rank = static_cast<size_t>(group.neighbour(local).rank);
    return input + (rank * count + first) * element;
  }
};

void staged(const Parts &parts, bool compare) {
  Group &group = parts.group;
  const int here = group.ranks_here(), me = group.topology().local;
  // A slot holds one slice for each neighbour; slices start on cache lines.
  const size_t slice_bytes =
      std::max<size_t>(group.chunk_bytes() / static_cast<size_t>(here - 1), 64) & ~size_t{63};
  const size_t slice = slice_bytes / parts.element;
  const auto place_in_slot = [&](int owner, int reader) {
    return static_cast<size_t>(reader < owner ? reader : reader - 1) * slice_bytes;
  };
  const uint32_t steps =
      static_cast<uint32_t>(std::max<size_t>(1, (parts.count + slice - 1) / slice));
  const uint32_t first = group.take_steps(kInputs, steps);
  std::vector<const void *> sources(static_cast<size_t>(here));
  uint32_t posted = 0;
  for (uint32_t s = 0; s < steps; ++s) {
    for (; posted < std::min(steps, s + 2); ++posted) {
      const size_t from = posted * slice,
                   n = std::min(slice, parts.count - std::min(parts.count, from));
      group.await_free(kInputs, first + posted);
      unsigned char *slot = group.mine().slot(kInputs, first + posted);
      for (int i = 1; i < here; ++i) {
        const int other = (me + i) % here;
        group.slots.write(slot + place_in_slot(me, other), parts.mine_for(other, from),
                          n * parts.element);
      }
      group.post(kInputs, first + posted);
    }
    const size_t from = s * slice, n = std::min(slice, parts.count - std::min(parts.count, from));
    for (int i = 0; i < here; ++i) {
      if (i == me) {
        sources[static_cast<size_t>(i)] = parts.mine_for(me, from);
        continue;
      }
      group.await_post(kInputs, first + s, i);
      if (compare && s == 0) group.compare_call(i);
      sources[static_cast<size_t>(i)] =
          group.neighbour(i).segment->slot(kInputs, first + s) + place_in_slot(i, me);
    }
    reduce(parts.dtype, parts.reduce_op, sources.data(), here, parts.output + from * parts.element,
           n, parts.scale, parts.stream);
    group.consume(kInputs, first + s);
  }
}

void pulled(const Parts &parts) {
  Group &group = parts.group;
  const int here = group.ranks_here(), me = group.topology().local;
  std::vector<const void *> sources(static_cast<size_t>(here));
  const size_t block = kPulledBlock / parts.element;
  for (size_t from = 0; from < parts.count; from += block) {
    const size_t rank = static_cast<size_t>(group.rank());
    for (int i = 0; i < here; ++i)
      sources[static_cast<size_t>(i)] = i == me
                                            ? parts.mine_for(me, from)
                                            : group.neighbour(i).memory + group.call_of(i).input +
                                                  (rank * parts.count + from) * parts.element;
    reduce(parts.dtype, parts.reduce_op, sources.data(), here, parts.output + from * parts.element,
           std::min(block, parts.count - from), parts.scale, parts.stream);
  }
}

}  // namespace

void local_reduce_scatter(Group &group, const nlc_call &call) {
  const int here = group.ranks_here();
  const size_t element = element_bytes(call.dtype), bytes = call.count * element;
  const Parts parts{group,
                    static_cast<const char *>(call.input),
                    static_cast<char *>(call.output),
                    element,
                    call.count,
                    call.dtype,
                    call.reduce,
                    call.scale,
                    bytes >= group.stream_bytes()};
  if (bytes * static_cast<size_t>(here) <= kSmall) {
    group.path = "staged";
    return staged(parts, true);
  }
  const uint32_t step = group.take_steps(kInputs, 1);
  group.publish_input(parts.input, bytes * static_cast<size_t>(here));
  meet(group, step);
  const bool readable = all_pooled(group);
  if (readable) {
    group.path = "pulled";
    pulled(parts);
  }
  group.consume(kInputs, step);
  if (readable) return group.await_all(kInputs, step);
  group.path = "staged";
  staged(parts, false);
}

void reduce_scatter(Group &group, const nlc_call &call) {
  if (group.size() == 1) {
    reduce(call.dtype, call.reduce, &call.input, 1, call.output, call.count, call.scale, false);
  } else if (group.topology().node_count() > 1) {
    node_reduce_scatter(group, call);
  } else {
    local_reduce_scatter(group, call);
  }
}

}  // namespace nlc
