// Collectives among the ranks of one node, through its memory. They are complete operations for a
// group on one node and the inner stage of the hierarchical ones.
//
// There are three data paths; all ranks choose the same one after the first step of a call:
//   staged   through slots of shared memory, in chunks that stay in the cache; any memory
//   pulled   read from the neighbour's pool directly into the output, one copy
//   shared   only all_gather into a shared output: the parts are in place, no copy
#pragma once

#include <functional>

#include "group.h"

namespace nlc {

// Destination of the part of the rank with this index on the node.
using PartOf = std::function<char *(int local)>;

// Make every rank's `bytes` at input appear at part(i) on every rank; in place if part(me) ==
// input.
void local_all_gather(Group &group, const nlc_call &call, const char *input, const PartOf &part,
                      size_t bytes, bool stream);

void local_reduce_scatter(Group &group, const nlc_call &call);
void local_all_reduce(Group &group, const nlc_call &call);
void local_broadcast(Group &group, const nlc_call &call);
void local_barrier(Group &group);

// Copy the memory of one rank of the node to the same place of the call on all others.
void spread(Group &group, int from_local, char *data, size_t bytes);

// Post a step without data and wait for the neighbours' steps. Afterwards their calls have been
// compared with this rank's and their memory locations are known. The caller calls consume().
void meet(Group &group, uint32_t step);

// Return true if every rank of the node has published an input in its pool.
bool all_pooled(Group &group);

}  // namespace nlc
