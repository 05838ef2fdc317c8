// Broadcast and barrier.
#include <algorithm>

#include "copy.h"
#include "local.h"
#include "nodes.h"
#include "reduce.h"

namespace nlc {

void meet(Group &group, uint32_t step) {
  group.await_free(kInputs, step);
  group.post(kInputs, step);
  for (int i = 0; i < group.ranks_here(); ++i) {
    if (i != group.topology().local) group.await_post(kInputs, step, i);
    group.compare_call(i);
  }
}

bool all_pooled(Group &group) {
  for (int i = 0; i < group.ranks_here(); ++i)
    if (group.call_of(i).input < 0) return false;
  return true;
}

void local_barrier(Group &group) {
  const uint32_t step = group.take_steps(kInputs, 1);
  meet(group, step);
  group.consume(kInputs, step);
}

void spread(Group &group, int from_local, char *data, size_t bytes) {
  const int me = group.topology().local;
  const size_t chunk = group.chunk_bytes();
  const uint32_t steps = static_cast<uint32_t>((bytes + chunk - 1) / chunk);
  const uint32_t first = group.take_steps(kResults, steps);
  for (uint32_t s = 0; s < steps; ++s) {
    const size_t offset = s * chunk, n = std::min(chunk, bytes - offset);
    if (me == from_local) {
      group.await_free(kResults, first + s);
      group.slots.write(group.mine().slot(kResults, first + s), data + offset, n);
      group.post(kResults, first + s);
    } else {
      group.await_post(kResults, first + s, from_local);
      copy(data + offset, group.neighbour(from_local).segment->slot(kResults, first + s), n, false);
      group.post(kResults, first + s);
    }
    group.consume(kResults, first + s);
  }
}

void local_broadcast(Group &group, const nlc_call &call) {
  const auto &ranks = group.topology().neighbours();
  const int root =
      static_cast<int>(std::find(ranks.begin(), ranks.end(), call.root) - ranks.begin());
  local_barrier(group);
  group.path = "staged";
  spread(group, root, static_cast<char *>(call.output), call.count * element_bytes(call.dtype));
}

void broadcast(Group &group, const nlc_call &call) {
  if (group.size() == 1) return;
  if (group.topology().node_count() > 1) return node_broadcast(group, call);
  local_broadcast(group, call);
}

void barrier(Group &group) {
  if (group.size() == 1) return;
  if (group.topology().node_count() > 1) return node_barrier(group);
  local_barrier(group);
}

}  // namespace nlc
