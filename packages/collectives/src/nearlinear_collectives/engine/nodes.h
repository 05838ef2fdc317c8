// Collectives over several nodes. The leader of each node (its first rank) communicates with the
// other leaders on behalf of its node: every remote byte crosses a node's network card once, and
// the ranks of a node share it through their memory while more arrives.
//
// Leaders send piece by piece. Each piece goes to the next node in the ring of nodes first and to
// the previous node last (shift order), so that all nodes receive as much as they send at any time.
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

// --- building blocks -----------------------------------------------------------------------------

// The part of a call's memory that belongs to a rank of the group.
struct Span {
  char *data;
  size_t bytes;
};
using SpanOf = std::function<Span(int rank)>;

// Start of every operation: leaders exchange their calls, and confirm() compares those of the other
// nodes with this node's. With `meet_neighbours`, the constructor also compares the neighbours'
// calls; operations that exchange data within the node compare them there.
class Opening {
 public:
  Opening(Group &group, bool meet_neighbours);
  void confirm();  // leader only; waits for the calls of the other nodes

 private:
  Group &group_;
  std::vector<CallSignature> theirs_;
  std::vector<Request> sent_, received_;
};

// Nodes in the order in which this one sends to them (+1) or receives from them (-1).
int node_at(const Group &group, int shift);

// Share every rank's span, already in place on the rank itself, with its neighbours. Their calls
// are compared with this rank's if there is anything to share.
void share_in_node(Group &group, const SpanOf &span, bool stream);

// Share every rank's span, already in place on the rank itself, with all ranks of all nodes.
void share_between_nodes(Group &group, Opening &opening, const SpanOf &span, bool stream);

// Bytes of each rank's span per piece, so that a block of `ranks` spans fits a slot and network and
// memory transfers overlap.
size_t piece_bytes(const Group &group, size_t blocks_per_slot);

// Reduce every rank's input for each piece of a span into output(rank) on that rank.
struct NodeReduction {
  int dtype, reduce;
  double scale;
  size_t element;
  SpanOf input;  // this rank's contribution to a rank's span
  char *output;  // result of this rank's span; may be its input
};
void reduce_between_nodes(Group &group, Opening &opening, const NodeReduction &reduction);

}  // namespace nlc
