// In-place all-reduce: a reduce-scatter and an all-gather of one chunk after the other. Each
// element is reduced by one rank, in rank order, so all ranks get the same bits.
#include <algorithm>
#include <vector>

#include "copy.h"
#include "local.h"
#include "nodes.h"
#include "reduce.h"

namespace nlc {
namespace {

constexpr size_t kOneShot = 32 << 10;  // up to this size, every rank reduces everything

struct Slices {  // the elements [0, count) divided among the ranks of the node
  size_t count, each;
  Slices(size_t count, int ranks)
      : count(count),
        each(((count + static_cast<size_t>(ranks) - 1) / static_cast<size_t>(ranks) + 63) &
             ~size_t{63}) {}
  size_t begin(int i) const { return std::min(count, static_cast<size_t>(i) * each); }
  size_t size(int i) const { return begin(i + 1) - begin(i); }
};

void one_shot(Group &group, const nlc_call &call, size_t element) {
  const int here = group.ranks_here(), me = group.topology().local;
  const uint32_t step = group.take_steps(kInputs, 1);
  group.await_free(kInputs, step);
  copy(group.mine().slot(kInputs, step), call.output, call.count * element, false);
  group.post(kInputs, step);
  std::vector<const void *> sources(static_cast<size_t>(here));
  for (int i = 0; i < here; ++i) {
    if (i != me) group.await_post(kInputs, step, i);
    group.compare_call(i);
    sources[static_cast<size_t>(i)] = group.neighbour(i).segment->slot(kInputs, step);
  }
  reduce(call.dtype, call.reduce, sources.data(), here, call.output, call.count, call.scale, false);
  group.consume(kInputs, step);
}

void staged(Group &group, const nlc_call &call, size_t element) {
  const int here = group.ranks_here(), me = group.topology().local;
  const size_t chunk = group.chunk_bytes() / element;
  const uint32_t steps = static_cast<uint32_t>((call.count + chunk - 1) / chunk);
  const uint32_t first_in = group.take_steps(kInputs, steps);
  const uint32_t first_out = group.take_steps(kResults, steps);
  char *data = static_cast<char *>(call.output);
  std::vector<const void *> sources(static_cast<size_t>(here));
  const auto slices_of = [&](uint32_t s) {
    return Slices(std::min(chunk, call.count - s * chunk), here);
  };

  const auto put = [&](uint32_t s) {  // everything but this rank's slice
    const Slices slices = slices_of(s);
    const char *from = data + s * chunk * element;
    group.await_free(kInputs, first_in + s);
    unsigned char *slot = group.mine().slot(kInputs, first_in + s);
    const size_t skip = slices.begin(me) * element, resume = slices.begin(me + 1) * element;
    group.slots.write(slot, from, skip);
    group.slots.write(slot + resume, from + resume, slices.count * element - resume);
    group.post(kInputs, first_in + s);
  };
  const auto reduce_mine = [&](uint32_t s) {
    const Slices slices = slices_of(s);
    const size_t begin = slices.begin(me) * element;
    char *own = data + s * chunk * element + begin;
    for (int i = 0; i < here; ++i) {
      if (i != me) group.await_post(kInputs, first_in + s, i);
      sources[static_cast<size_t>(i)] =
          i == me
              ? own
              : reinterpret_cast<char *>(group.neighbour(i).segment->slot(kInputs, first_in + s)) +
                    begin;
    }
    group.await_free(kResults, first_out + s);
    unsigned char *result = group.mine().slot(kResults, first_out + s);
    reduce(call.dtype, call.reduce, sources.data(), here, own, slices.size(me), call.scale, false);
    group.consume(kInputs, first_in + s);
    group.slots.write(result, own, slices.size(me) * element);
    group.post(kResults, first_out + s);
  };
  const auto gather = [&](uint32_t s) {
    const Slices slices = slices_of(s);
    for (int k = 1; k < here; ++k) {
      const int i = (me + k) % here;
      group.await_post(kResults, first_out + s, i);
      copy(data + (s * chunk + slices.begin(i)) * element,
           group.neighbour(i).segment->slot(kResults, first_out + s), slices.size(i) * element,
           false);
    }
    group.consume(kResults, first_out + s);
  };

  put(0);
  for (uint32_t s = 0; s < steps; ++s) {
    if (s + 1 < steps) put(s + 1);
    reduce_mine(s);
    if (s > 0) gather(s - 1);
  }
  gather(steps - 1);
}

void pulled(Group &group, const nlc_call &call, size_t element) {
  const int here = group.ranks_here(), me = group.topology().local;
  const Slices slices(call.count, here);
  const uint32_t done = group.take_steps(kResults, 1);
  const auto at = [&](int i) {
    return i == me ? static_cast<const char *>(call.output)
                   : group.neighbour(i).memory + group.call_of(i).input;
  };
  const size_t block = (256 << 10) / element;
  std::vector<const void *> sources(static_cast<size_t>(here));
  for (size_t from = slices.begin(me); from < slices.begin(me + 1); from += block) {
    for (int i = 0; i < here; ++i) sources[static_cast<size_t>(i)] = at(i) + from * element;
    reduce(call.dtype, call.reduce, sources.data(), here,
           static_cast<char *>(call.output) + from * element,
           std::min(block, slices.begin(me + 1) - from), call.scale, false);
  }
  group.post(kResults, done);
  for (int k = 1; k < here; ++k) {
    const int i = (me + k) % here;
    group.await_post(kResults, done, i);
    const size_t begin = slices.begin(i) * element;
    copy(static_cast<char *>(call.output) + begin, at(i) + begin, slices.size(i) * element, false);
  }
  group.consume(kResults, done);
  group.await_all(kResults, done);
}

}  // namespace

void local_all_reduce(Group &group, const nlc_call &call) {
  const size_t element = element_bytes(call.dtype), bytes = call.count * element;
  if (bytes <= kOneShot) {
    group.path = "one shot";
    return one_shot(group, call, element);
  }
  const uint32_t step = group.take_steps(kInputs, 1);
  group.publish_input(call.output, bytes);
  meet(group, step);
  const bool readable = all_pooled(group);
  group.consume(kInputs, step);
  group.path = readable ? "pulled" : "staged";
  if (readable)
    pulled(group, call, element);
  else
    staged(group, call, element);
}

void all_reduce(Group &group, const nlc_call &call) {
  if (group.size() == 1) {
    const void *source = call.output;
    reduce(call.dtype, call.reduce, &source, 1, call.output, call.count, call.scale, false);
  } else if (group.topology().node_count() > 1) {
    node_all_reduce(group, call);
  } else {
    local_all_reduce(group, call);
  }
}

}  // namespace nlc
