// Collectives among the ranks of one node, through its memory. They are whole operations for a
// group on one node and the inner stage of the hierarchical ones.
//
// Three ways to move bytes, chosen alike by all ranks after the first step of a call:
//   staged   through slots of shared memory, in chunks that stay in the cache; any memory
//   pulled   read from the neighbour's pool straight into the output, one copy
//   shared   all_gather into a shared output only: the parts are there already, no copy
#pragma once

#include <functional>

#include "group.h"

namespace nlc {

// Where the parts of a gather go: the memory for the rank with this index on the node.
using PartOf = std::function<char *(int local)>;

// Every rank's `bytes` at input appear at part(i) on every rank; in place if part(me) == input.
void local_all_gather(Group &group, const nlc_call &call, const char *input, const PartOf &part,
                      size_t bytes, bool stream);

void local_reduce_scatter(Group &group, const nlc_call &call);
void local_all_reduce(Group &group, const nlc_call &call);
void local_broadcast(Group &group, const nlc_call &call);
void local_barrier(Group &group);

// The memory of one rank of the node appears at the same place of the call on all the others.
void spread(Group &group, int from_local, char *data, size_t bytes);

// Posts a step without data and waits for the neighbours': afterwards their calls have been
// compared with mine and their places are known. consume() is left to the caller.
void meet(Group &group, uint32_t step);

// Whether every rank of the node has published an input that lies in its pool.
bool all_pooled(Group &group);

}  // namespace nlc
