#include "nodes.h"

#include <algorithm>
#include <utility>

#include "copy.h"
#include "local.h"
#include "reduce.h"

namespace nlc {

int node_at(const Group &group, int shift) {
  const int nodes = group.topology().node_count();
  return ((group.topology().node + shift) % nodes + nodes) % nodes;
}

size_t piece_bytes(const Group &group, size_t blocks_per_slot) {
  size_t most = 1;
  for (const auto &ranks : group.topology().nodes) most = std::max(most, ranks.size());
  const size_t block = std::min(group.node_chunk_bytes(), kSlotBytes / blocks_per_slot);
  return std::max(block / most & ~(kSmallestPiece - 1), kSmallestPiece);  // see find_topology
}

// --- opening -------------------------------------------------------------------------------------

Opening::Opening(Group &group, bool meet_neighbours) : group_(group) {
  const int nodes = group.topology().node_count();
  if (group.topology().leads()) {
    theirs_.resize(static_cast<size_t>(nodes));
    sent_.resize(static_cast<size_t>(nodes));
    received_.resize(static_cast<size_t>(nodes));
    for (int shift = 1; shift < nodes; ++shift) {
      const int to = node_at(group, shift), from = node_at(group, -shift);
      group.net().post_send(to, &group.current(), sizeof(CallSignature),
                            &sent_[static_cast<size_t>(to)]);
      group.net().post_receive(from, &theirs_[static_cast<size_t>(from)], sizeof(CallSignature),
                               &received_[static_cast<size_t>(from)]);
    }
  }
  if (meet_neighbours && group.ranks_here() > 1) local_barrier(group);
}

void Opening::confirm() {
  const int nodes = group_.topology().node_count();
  for (int node = 0; node < nodes; ++node) {
    if (node == group_.topology().node) continue;
    const size_t i = static_cast<size_t>(node);
    group_.await(received_[i]);
    group_.compare_with(theirs_[i], group_.topology().nodes[i][0]);
    group_.await(sent_[i]);
  }
}

// --- all-gather ----------------------------------------------------------------------------------

void share_in_node(Group &group, const SpanOf &span, bool stream) {
  const int here = group.ranks_here(), me = group.topology().local;
  if (here == 1) return;
  const auto span_of = [&](int local) { return span(group.neighbour(local).rank); };
  size_t longest = 0;
  for (int i = 0; i < here; ++i) longest = std::max(longest, span_of(i).bytes);
  const size_t chunk = group.chunk_bytes();
  const uint32_t steps = static_cast<uint32_t>((longest + chunk - 1) / chunk);
  const uint32_t first = group.take_steps(kInputs, steps);
  const auto piece = [&](int local, uint32_t s) {
    const Span whole = span_of(local);
    const size_t begin = std::min(whole.bytes, s * chunk);
    return Span{whole.data + begin, std::min(chunk, whole.bytes - begin)};
  };
  uint32_t posted = 0;
  for (uint32_t s = 0; s < steps; ++s) {
    for (; posted < std::min(steps, s + 2); ++posted) {
      group.await_free(kInputs, first + posted);
      const Span mine = piece(me, posted);
      group.slots.write(group.mine().slot(kInputs, first + posted), mine.data, mine.bytes);
      group.post(kInputs, first + posted);
    }
    for (int k = 1; k < here; ++k) {
      const int other = (me + k) % here;
      group.await_post(kInputs, first + s, other);
      if (s == 0) group.compare_call(other);
      const Span theirs = piece(other, s);
      copy(theirs.data, group.neighbour(other).segment->slot(kInputs, first + s), theirs.bytes,
           stream);
    }
    group.consume(kInputs, first + s);
  }
}

namespace {

// The pieces of one node's spans: for each, its place in a slot and in memory.
class Pieces {
 public:
  Pieces(const Group &group, int node, const SpanOf &span, size_t piece)
      : ranks_(group.topology().nodes[static_cast<size_t>(node)]), span_(span), piece_(piece) {}

  template <typename Visit>  // visit(offset in the slot, span)
  void at(size_t index, Visit visit) const {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      const Span whole = span_(ranks_[i]);
      const size_t begin = std::min(whole.bytes, index * piece_);
      const size_t bytes = std::min(piece_, whole.bytes - begin);
      if (bytes) visit(i * piece_, Span{whole.data + begin, bytes});
    }
  }
  size_t messages(size_t index) const {
    size_t n = 0;
    at(index, [&](size_t, Span) { ++n; });
    return n;
  }
  size_t count() const {
    size_t longest = 0;
    for (const int rank : ranks_) longest = std::max(longest, span_(rank).bytes);
    return (longest + piece_ - 1) / piece_;
  }

 private:
  const std::vector<int> &ranks_;
  const SpanOf &span_;
  size_t piece_;
};

}  // namespace

void share_between_nodes(Group &group, Opening &opening, const SpanOf &span, bool stream) {
  const int nodes = group.topology().node_count();
  const bool leads = group.topology().leads(), alone = group.ranks_here() == 1;
  const size_t piece = piece_bytes(group, 1);
  std::vector<Pieces> pieces;  // by shift; [0] is this node's
  size_t most = 0;
  for (int shift = 0; shift < nodes; ++shift) {
    pieces.emplace_back(group, node_at(group, -shift), span, piece);
    most = std::max(most, pieces.back().count());
  }
  std::vector<Request> sent;
  std::vector<std::vector<Request>> received(most * static_cast<size_t>(nodes));
  const auto arrivals = [&](size_t c, int shift) -> std::vector<Request> & {
    return received[c * static_cast<size_t>(nodes) + static_cast<size_t>(shift)];
  };
  if (leads) {
    size_t messages = 0;
    for (size_t c = 0; c < most; ++c) messages += pieces[0].messages(c);
    sent.resize(messages * static_cast<size_t>(nodes - 1));
    size_t next = 0;
    const auto send = [&](int shift, Span part) {
      group.net().post_send(node_at(group, shift), part.data, part.bytes, &sent[next++]);
    };
    // The leader's own span is the first of its node's pieces: it is sent to the next node while
    // the neighbours still stage theirs.
    const Span own = span(group.rank());
    const bool early = !alone && own.bytes > 0;
    if (early) send(1, Span{own.data, std::min(piece, own.bytes)});
    share_in_node(group, span, stream);
    for (size_t c = 0; c < most; ++c) {
      for (int shift = 1; shift < nodes; ++shift) {
        bool sent_before = early && c == 0 && shift == 1;
        pieces[0].at(c, [&](size_t, Span part) {
          if (!std::exchange(sent_before, false)) send(shift, part);
        });
        auto &requests = arrivals(c, shift);
        requests.resize(pieces[static_cast<size_t>(shift)].messages(c));
        size_t n = 0;
        pieces[static_cast<size_t>(shift)].at(c, [&](size_t, Span part) {
          group.net().post_receive(node_at(group, -shift), part.data, part.bytes, &requests[n++]);
        });
      }
    }
    opening.confirm();
  } else {
    share_in_node(group, span, stream);
  }
  // All nodes send at the same time, so the pieces of all nodes are interleaved.
  for (size_t c = 0; c < most; ++c) {
    for (int shift = 1; shift < nodes; ++shift) {
      const Pieces &theirs = pieces[static_cast<size_t>(shift)];
      if (c >= theirs.count()) continue;
      for (const Request &request : arrivals(c, shift)) group.await(request);
      if (alone) continue;
      const uint32_t step = group.take_steps(kFromLeader, 1);
      unsigned char *slot = group.leader().slot(kFromLeader, step);
      if (leads) {
        group.await_free(kFromLeader, step);
        theirs.at(c, [&](size_t at, Span part) { copy(slot + at, part.data, part.bytes, false); });
        group.post(kFromLeader, step);
      } else {
        group.await_post(kFromLeader, step, 0);
        theirs.at(c, [&](size_t at, Span part) { copy(part.data, slot + at, part.bytes, stream); });
        group.consume(kFromLeader, step);
      }
    }
  }
  for (const Request &request : sent) group.await(request);
}

void node_all_gather(Group &group, const nlc_call &call,
                     const std::function<char *(int rank)> &part, size_t bytes, bool stream) {
  group.path = "nodes";
  Opening opening(group, bytes == 0);
  if (part(group.rank()) != call.input) copy(part(group.rank()), call.input, bytes, stream);
  const SpanOf span = [&](int rank) { return Span{part(rank), bytes}; };
  share_between_nodes(group, opening, span, stream);
}

// --- broadcast, barrier --------------------------------------------------------------------------

void node_broadcast(Group &group, const nlc_call &call) {
  group.path = "nodes";
  Opening opening(group, true);
  const Topology &topology = group.topology();
  char *data = static_cast<char *>(call.output);
  const size_t bytes = call.count * element_bytes(call.dtype);
  const int root_node = topology.node_of[static_cast<size_t>(call.root)];
  const int nodes = topology.node_count(), after_root = (topology.node - root_node + nodes) % nodes;
  const size_t chunk = group.node_chunk_bytes();
  const uint32_t steps = static_cast<uint32_t>((bytes + chunk - 1) / chunk);
  const auto size_of = [&](uint32_t s) { return std::min(chunk, bytes - s * chunk); };
  if (after_root == 0) {
    const auto &ranks = topology.neighbours();
    const auto root = std::find(ranks.begin(), ranks.end(), call.root) - ranks.begin();
    if (group.ranks_here() > 1) spread(group, static_cast<int>(root), data, bytes);
  }
  // A chain of nodes: every link carries the data once, in chunks that are forwarded on arrival.
  std::vector<Request> sent(steps), received(steps);
  const bool passes_on = topology.leads() && after_root < nodes - 1;
  if (topology.leads()) {
    if (after_root > 0)
      for (uint32_t s = 0; s < steps; ++s)
        group.net().post_receive(node_at(group, -1), data + s * chunk, size_of(s), &received[s]);
    opening.confirm();
  }
  const uint32_t first = after_root > 0 ? group.take_steps(kFromLeader, steps) : 0;
  for (uint32_t s = 0; s < steps; ++s) {
    char *part = data + s * chunk;
    if (topology.leads()) {
      if (after_root > 0) group.await(received[s]);
      if (passes_on) group.net().post_send(node_at(group, 1), part, size_of(s), &sent[s]);
    }
    if (after_root == 0 || group.ranks_here() == 1) continue;
    if (topology.leads()) {
      group.await_free(kFromLeader, first + s);
      copy(group.mine().slot(kFromLeader, first + s), part, size_of(s), false);
      group.post(kFromLeader, first + s);
    } else {
      group.await_post(kFromLeader, first + s, 0);
      copy(part, group.leader().slot(kFromLeader, first + s), size_of(s), false);
      group.consume(kFromLeader, first + s);
    }
  }
  if (passes_on)
    for (const Request &request : sent) group.await(request);
}

void node_barrier(Group &group) {
  group.path = "nodes";
  Opening opening(group, true);
  const uint32_t step = group.take_steps(kFromLeader, 1);
  if (group.topology().leads()) {
    opening.confirm();
    group.await_free(kFromLeader, step);
    group.post(kFromLeader, step);
  } else {
    group.await_post(kFromLeader, step, 0);
    group.consume(kFromLeader, step);
  }
}

}  // namespace nlc
