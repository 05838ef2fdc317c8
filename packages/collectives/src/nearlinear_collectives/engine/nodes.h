// Collectives over several nodes. The leader of each node (its first rank) talks to the other
// leaders for all of its node: every remote byte crosses a node's network card once, and the
// ranks of a node share it through their memory while more arrives.
//
// Leaders send to one node at a time, each beginning with the next one in the ring of nodes
// (shift order), so that no node is the target of two senders at once.
#pragma once

#include <functional>
#include <vector>

#include "group.h"

namespace nlc {

void node_all_gather(Group &group, const nlc_call &call, const std::function<char *(int rank)> &part,
                     size_t bytes, bool stream);
void node_reduce_scatter(Group &group, const nlc_call &call);
void node_all_reduce(Group &group, const nlc_call &call);
void node_broadcast(Group &group, const nlc_call &call);
void node_barrier(Group &group);

// --- what they are made of -----------------------------------------------------------------------

// The part of a call's memory that belongs to a rank of the group.
struct Span {
  char *data;
  size_t bytes;
};
using SpanOf = std::function<Span(int rank)>;

// The begin of every operation: neighbours' calls have been compared with mine when it returns,
// the other nodes' when confirm() does. Leaders tell each other their calls by the way.
class Opening {
 public:
  explicit Opening(Group &group);
  void confirm();  // leader only; waits for the other nodes' calls

 private:
  Group &group_;
  std::vector<CallCard> theirs_;
  std::vector<Request> sent_, received_;
};

// Nodes in the order this one sends to them (+1) or hears from them (-1).
int node_at(const Group &group, int shift);

// Every rank's span, already in place on the rank itself, appears on its neighbours.
void share_in_node(Group &group, const SpanOf &span, bool stream);

// Every rank's span, already in place on the rank itself, appears on all ranks of all nodes.
void share_between_nodes(Group &group, Opening &opening, const SpanOf &span, bool stream);

// Bytes of each rank's span that are sent, staged and shared at a time, for a block of `ranks`
// spans to fit a slot and to overlap network and memory.
size_t piece_bytes(const Group &group, size_t blocks_per_slot);

// In pieces of every rank's span: everybody's input for it is reduced into output(rank) there.
struct NodeReduction {
  int dtype, reduce;
  double scale;
  size_t element;
  SpanOf input;   // my contribution to a rank's span
  char *output;   // my own span's result; may be my own span's input
};
void reduce_between_nodes(Group &group, Opening &opening, const NodeReduction &reduction);

}  // namespace nlc
