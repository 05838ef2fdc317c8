// Collectives over several nodes. The leader of each node (its first rank) talks to the other
// leaders for all of its node: every remote byte crosses a node's network card once, and the
// ranks of a node share it through their memory while more arrives.
//
// Leaders send piece by piece, each piece to the next node in the ring of nodes first and to the
// one before last (shift order), so that all nodes receive as much as they send at any time.
#pragma once

#include <functional>
#include <vector>

#include "group.h"

namespace nlc {

void node_all_gather(Group &group, const nlc_call &call,
                     const std::function<char *(int rank)> &part, size_t bytes, bool stream);
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

// The begin of every operation: leaders tell each other their calls, and confirm() compares the
// other nodes' with mine. The neighbours' have been compared when it returns if they meet here;
// operations that exchange data in the node anyway compare them then and need no meeting.
class Opening {
 public:
  Opening(Group &group, bool meet_neighbours);
  void confirm();  // leader only; waits for the other nodes' calls

 private:
  Group &group_;
  std::vector<CallCard> theirs_;
  std::vector<Request> sent_, received_;
};

// Nodes in the order this one sends to them (+1) or hears from them (-1).
int node_at(const Group &group, int shift);

// Every rank's span, already in place on the rank itself, appears on its neighbours, whose calls
// are compared with mine if there is anything to share.
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
  SpanOf input;  // my contribution to a rank's span
  char *output;  // my own span's result; may be my own span's input
};
void reduce_between_nodes(Group &group, Opening &opening, const NodeReduction &reduction);

}  // namespace nlc
