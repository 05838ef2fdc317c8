// Reductions over several nodes: data is reduced over the ranks of a node before it leaves the
// node.
//
// For each piece of every rank's span, the ranks of a node stage their contributions to each other
// node in turn, each rank reduces its share of them into the leader's outbox, and the leader sends
// it. The leader receives the other nodes' sums for its own ranks into a shared landing slot, where
// each rank adds them up for its span in node order, so results do not depend on timing.
#include <algorithm>
#include <vector>

#include "copy.h"
#include "nodes.h"
#include "reduce.h"

namespace nlc {
namespace {

struct Piece {
  size_t begin, bytes;
};

Piece piece_of(size_t whole, size_t piece, size_t index) {
  const size_t begin = std::min(whole, index * piece);
  return {begin, std::min(piece, whole - begin)};
}

class Stages {
 public:
  Stages(Group &group, Opening &opening, const NodeReduction &work)
      : group_(group),
        opening_(opening),
        work_(work),
        nodes_(group.topology().node_count()),
        here_(group.ranks_here()),
        me_(group.topology().local),
        leads_(group.topology().leads()),
        piece_(piece_bytes(group, static_cast<size_t>(nodes_)) / 8 * 8) {
    size_t longest = 0;
    for (int r = 0; r < group.size(); ++r) longest = std::max(longest, work.input(r).bytes);
    pieces_ = (longest + piece_ - 1) / piece_;
    const auto steps = [this](size_t per_piece) {
      return static_cast<uint32_t>(pieces_ * per_piece);
    };
    first_input_ = here_ > 1 ? group.take_steps(kInputs, steps(static_cast<size_t>(nodes_))) : 0;
    first_outbox_ =
        here_ > 1 ? group.take_steps(kResults, steps(static_cast<size_t>(nodes_ - 1))) : 0;
    first_landing_ = group.take_steps(kFromLeader, steps(1));
    sent_.resize(pieces_ * static_cast<size_t>(nodes_ - 1));
    received_.resize(pieces_);
  }

  void run() {
    if (leads_) opening_.confirm();
    for (size_t c = 0; c < pieces_; ++c) {
      if (leads_) receive(c);
      for (int shift = 1; shift < nodes_; ++shift) send(c, shift);
      if (here_ > 1) reduce_own(c);
      if (c > 0) finish(c - 1);
    }
    if (pieces_ > 0) finish(pieces_ - 1);
    for (auto &requests : sent_)
      for (const Request &request : requests) group_.await(request);
    // Every outbox slot is free again, and neighbours have nothing to read in them.
    if (here_ > 1 && pieces_ > 0)
      group_.consume(kResults, first_outbox_ + static_cast<uint32_t>(sent_.size()) - 1);
  }

 private:
  const std::vector<int> &ranks_of(int node) const {
    return group_.topology().nodes[static_cast<size_t>(node)];
  }
  uint32_t landing_step(size_t c) const { return first_landing_ + static_cast<uint32_t>(c); }
  uint32_t input_step(size_t c, int shift) const {  // shift 0, this node, comes last
    const int order = shift == 0 ? nodes_ - 1 : shift - 1;
    return first_input_ + static_cast<uint32_t>(c) * static_cast<uint32_t>(nodes_) +
           static_cast<uint32_t>(order);
  }
  // Landing place of another node's sum for one of this node's ranks.
  unsigned char *landing(size_t c, int shift, int local) {
    return group_.leader().slot(kFromLeader, landing_step(c)) +
           (static_cast<size_t>(shift - 1) * static_cast<size_t>(here_) +
            static_cast<size_t>(local)) *
               piece_;
  }

  void receive(size_t c) {
    group_.await_free(kFromLeader, landing_step(c));
    auto &requests = received_[c];
    requests.resize(static_cast<size_t>(nodes_ - 1) * static_cast<size_t>(here_));
    size_t next = 0;
    for (int shift = 1; shift < nodes_; ++shift)
      for (int i = 0; i < here_; ++i) {
        const Piece part = piece_of(work_.input(group_.neighbour(i).rank).bytes, piece_, c);
        Request &request = requests[next++];
        if (part.bytes)
          group_.net().post_receive(node_at(group_, -shift), landing(c, shift, i), part.bytes,
                                    &request);
        else
          request.done = true;
      }
  }

  // Stage this rank's contributions to a node's spans side by side in its slot.
  void stage(size_t c, int shift) {
    const uint32_t step = input_step(c, shift);
    group_.await_free(kInputs, step);
    const auto &ranks = ranks_of(node_at(group_, shift));
    for (size_t i = 0; i < ranks.size(); ++i) {
      const Span span = work_.input(ranks[i]);
      const Piece part = piece_of(span.bytes, piece_, c);
      copy(group_.mine().slot(kInputs, step) + i * piece_, span.data + part.begin, part.bytes,
           false);
    }
    group_.post(kInputs, step);
    for (int i = 0; i < here_; ++i) {
      if (i == me_) continue;
      group_.await_post(kInputs, step, i);
      if (step == first_input_) group_.compare_call(i);
    }
  }

  void reduce_staged(uint32_t step, size_t offset, size_t bytes, void *to) {
    std::vector<const void *> sources;
    for (int i = 0; i < here_; ++i)
      sources.push_back(group_.neighbour(i).segment->slot(kInputs, step) + offset);
    reduce(work_.dtype, work_.reduce, sources.data(), here_, to, bytes / work_.element, 1.0, false);
  }

  void send(size_t c, int shift) {
    const int to = node_at(group_, shift);
    const auto &ranks = ranks_of(to);
    const size_t index = c * static_cast<size_t>(nodes_ - 1) + static_cast<size_t>(shift - 1);
    const uint32_t outbox = first_outbox_ + static_cast<uint32_t>(index);
    auto &requests = sent_[index];
    if (here_ == 1) {  // nothing to reduce: send from the caller's memory
      requests.resize(ranks.size());
      for (size_t i = 0; i < ranks.size(); ++i) {
        const Span span = work_.input(ranks[i]);
        post(to, span.data, piece_of(span.bytes, piece_, c), requests[i], 1);
      }
      return;
    }
    const uint32_t slots = group_.ring_slots();
    if (leads_ && index >= slots) {  // its outbox slot is free once its last send has completed
      for (const Request &request : sent_[index - slots]) group_.await(request);
      group_.consume(kResults, outbox - slots);
    }
    stage(c, shift);
    if (!leads_) group_.await_consumed_by(0, kResults, outbox - slots);
    unsigned char *slot = group_.leader().slot(kResults, outbox);
    for (size_t i = 0; i < ranks.size(); ++i) {  // this rank's share of each piece
      const Piece part = piece_of(work_.input(ranks[i]).bytes, piece_, c);
      const size_t share =
          ((part.bytes + static_cast<size_t>(here_) - 1) / static_cast<size_t>(here_) + 63) &
          ~size_t{63};
      const Piece mine = piece_of(part.bytes, share, static_cast<size_t>(me_));
      if (mine.bytes)
        reduce_staged(input_step(c, shift), i * piece_ + mine.begin, mine.bytes,
                      slot + i * piece_ + mine.begin);
    }
    group_.post(kResults, outbox);
    group_.consume(kInputs, input_step(c, shift));
    if (!leads_) return;
    for (int i = 1; i < here_; ++i) group_.await_post(kResults, outbox, i);
    requests.resize(ranks.size());
    for (size_t i = 0; i < ranks.size(); ++i)
      post(to, reinterpret_cast<char *>(slot) + i * piece_,
           piece_of(work_.input(ranks[i]).bytes, piece_, c), requests[i], 0);
  }

  void post(int to, const char *data, const Piece &part, Request &request, int offset_too) {
    if (part.bytes)
      group_.net().post_send(to, data + (offset_too ? part.begin : 0), part.bytes, &request);
    else
      request.done = true;
  }

  void reduce_own(size_t c) {
    stage(c, 0);
    const Piece part = piece_of(work_.input(group_.rank()).bytes, piece_, c);
    reduce_staged(input_step(c, 0), static_cast<size_t>(me_) * piece_, part.bytes,
                  work_.output + part.begin);
    group_.consume(kInputs, input_step(c, 0));
  }

  void finish(size_t c) {
    if (leads_) {
      for (const Request &request : received_[c]) group_.await(request);
      group_.post(kFromLeader, landing_step(c));
    } else {
      group_.await_post(kFromLeader, landing_step(c), 0);
    }
    const Span own = work_.input(group_.rank());
    const Piece part = piece_of(own.bytes, piece_, c);
    std::vector<const void *> sources;
    for (int node = 0; node < nodes_; ++node) {
      const int shift =
          (group_.topology().node - node + nodes_) % nodes_;  // seen from there, it is at -shift
      sources.push_back(shift ? static_cast<const void *>(landing(c, shift, me_))
                              : (here_ > 1 ? work_.output : own.data) + part.begin);
    }
    reduce(work_.dtype, work_.reduce, sources.data(), nodes_, work_.output + part.begin,
           part.bytes / work_.element, work_.scale, false);
    if (here_ > 1) group_.consume(kFromLeader, landing_step(c));
  }

  Group &group_;
  Opening &opening_;
  const NodeReduction &work_;
  const int nodes_, here_, me_;
  const bool leads_;
  const size_t piece_;
  size_t pieces_ = 0;
  uint32_t first_input_ = 0, first_outbox_ = 0, first_landing_ = 0;
  std::vector<std::vector<Request>> sent_, received_;
};

}  // namespace

void reduce_between_nodes(Group &group, Opening &opening, const NodeReduction &reduction) {
  Stages(group, opening, reduction).run();
}

void node_reduce_scatter(Group &group, const nlc_call &call) {
  group.path = "nodes";
  Opening opening(group, call.count == 0);
  const size_t element = element_bytes(call.dtype), bytes = call.count * element;
  char *input = static_cast<char *>(const_cast<void *>(call.input));
  reduce_between_nodes(
      group, opening,
      {call.dtype, call.reduce, call.scale, element,
       [=](int rank) { return Span{input + static_cast<size_t>(rank) * bytes, bytes}; },
       static_cast<char *>(call.output)});
}

void node_all_reduce(Group &group, const nlc_call &call) {
  group.path = "nodes";
  Opening opening(group, call.count == 0);
  const size_t element = element_bytes(call.dtype), size = static_cast<size_t>(group.size());
  const size_t each = (call.count + size - 1) / size;
  char *data = static_cast<char *>(call.output);
  const SpanOf span = [=](int rank) {
    const size_t begin = std::min<size_t>(call.count, static_cast<size_t>(rank) * each);
    const size_t end = std::min<size_t>(call.count, begin + each);
    return Span{data + begin * element, (end - begin) * element};
  };
  reduce_between_nodes(
      group, opening,
      {call.dtype, call.reduce, call.scale, element, span, span(group.rank()).data});
  share_between_nodes(group, opening, span, false);
}

}  // namespace nlc
