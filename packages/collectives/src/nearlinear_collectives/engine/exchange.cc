// Exchanges: every rank sends a part of its memory to every other rank, of any size. All-to-all,
// gather, scatter, and all-gather and reduce-scatter of uneven parts.
//
// A rank knows the sizes of its own transfers only. In the first step the ranks of a node therefore
// show each other the sizes and places of all their transfers, with the data if it is short; from
// then on they derive the same steps. Longer data is read from the neighbours' pools, or staged in
// slots. Between nodes, ranks stage their parts for one node after the other in outboxes, from
// which the leader sends them; it receives the other nodes' parts in landing slots, from which its
// neighbours copy theirs.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "copy.h"
#include "local.h"
#include "nodes.h"
#include "reduce.h"

namespace nlc {
namespace {

constexpr size_t kShort = 32 << 10;  // bytes of a rank for its neighbours that the first step holds
constexpr uint32_t kAhead = 3;       // steps between nodes in progress; fewer than slots

struct Transfers {  // of one rank with one other
  uint64_t sent, received;  // bytes
  int64_t place;            // of the sent data in the sender's arena, or -1
};
using Row = std::vector<Transfers>;  // of one rank with every rank of the group

size_t at(int index) { return static_cast<size_t>(index); }

// Memory of a call by rank of the group.
struct Parts {
  std::vector<Span> sent, received;
};

Span piece_of(const Span &whole, size_t piece, size_t index) {
  const size_t begin = std::min(whole.bytes, index * piece);
  return {whole.data + begin, std::min(piece, whole.bytes - begin)};
}

size_t piece_size(uint64_t bytes, size_t piece, size_t index) {
  return piece_of(Span{nullptr, bytes}, piece, index).bytes;
}

size_t most_ranks_on_a_node(const Group &group) {
  size_t most = 1;
  for (const auto &ranks : group.topology().nodes) most = std::max(most, ranks.size());
  return most;
}

// Refuse groups of so many ranks that rows or the smallest pieces do not fit a slot.
void check_limits(const Group &group) {
  const size_t most = (kSlotBytes - kShort) / sizeof(Transfers), most_here = 1024;
  if (at(group.size()) > most)
    throw Failure(NLC_BAD_ARGUMENT, format("an exchange of %d ranks: use groups of at most %zu",
                                           group.size(), most));
  if (group.topology().node_count() > 1 && most_ranks_on_a_node(group) > most_here)
    throw Failure(NLC_BAD_ARGUMENT,
                  format("an exchange of %zu ranks per node: use groups of at most %zu per node",
                         most_ranks_on_a_node(group), most_here));
}

// --- within a node -------------------------------------------------------------------------------

class WithinNode {
 public:
  WithinNode(Group &group, const Parts &parts)
      : group_(group),
        parts_(parts),
        ranks_(group.topology().neighbours()),
        here_(group.ranks_here()),
        me_(group.topology().local) {
    size_t all = 0;
    for (const Span &span : parts.received) all += span.bytes;
    stream_ = all >= group.stream_bytes();
  }

  const std::vector<Row> &rows() const { return rows_; }

  // Show this rank's row to its neighbours, and read theirs.
  void swap_rows() {
    const size_t size = at(group_.size()), row_bytes = size * sizeof(Transfers);
    rows_.assign(at(here_), Row(size));
    for (size_t r = 0; r < size; ++r) {
      const Span &out = parts_.sent[r];
      rows_[at(me_)][r] = {out.bytes, parts_.received[r].bytes,
                           Arena::of_this_process().offset_of(out.data, out.bytes)};
    }
    if (here_ == 1) return;
    step_ = group_.take_steps(kInputs, 1);
    group_.await_free(kInputs, step_);
    unsigned char *slot = group_.mine().slot(kInputs, step_);
    std::memcpy(slot, rows_[at(me_)].data(), row_bytes);
    if (is_short(me_))
      at_parts_of(me_, [&](int other, size_t from, size_t bytes) {
        std::memcpy(slot + row_bytes + from, parts_.sent[at(ranks_[at(other)])].data, bytes);
      });
    group_.post(kInputs, step_);
    for (int k = 1; k < here_; ++k) {
      const int other = (me_ + k) % here_;
      group_.await_post(kInputs, step_, other);
      group_.compare_call(other);
      const unsigned char *theirs = group_.neighbour(other).segment->slot(kInputs, step_);
      std::memcpy(rows_[at(other)].data(), theirs, row_bytes);
      const Transfers &pair = rows_[at(other)][at(group_.rank())];
      group_.compare_sizes(ranks_[at(other)], pair.sent, received(other).bytes);
      if (!is_short(other)) continue;
      at_parts_of(other, [&](int reader, size_t from, size_t bytes) {
        if (reader == me_) std::memcpy(received(other).data, theirs + row_bytes + from, bytes);
      });
    }
  }

  // Transfer everything that was not in the first step.
  void run() {
    if (here_ == 1) return;
    size_t longest = 0;
    bool pooled = true;
    for (int i = 0; i < here_; ++i)
      for (int other = 0; other < here_; ++other) {
        if (other == i || is_short(i)) continue;
        const Transfers &pair = rows_[at(i)][at(ranks_[at(other)])];
        longest = std::max<size_t>(longest, pair.sent);
        pooled = pooled && (pair.sent == 0 || pair.place >= 0);
      }
    group_.path = longest == 0 ? "first step" : pooled ? "pulled" : "staged";
    if (longest > 0 && pooled) {
      for (int k = 1; k < here_; ++k) {
        const int other = (me_ + k) % here_;
        const Transfers &pair = rows_[at(other)][at(group_.rank())];
        if (is_short(other) || pair.sent == 0) continue;
        copy(received(other).data, group_.neighbour(other).memory + pair.place, pair.sent, stream_);
      }
    }
    group_.consume(kInputs, step_);
    if (longest > 0 && pooled) return group_.await_all(kInputs, step_);
    if (longest > 0) staged(longest);
  }

 private:
  const Span &received(int other) const { return parts_.received[at(ranks_[at(other)])]; }

  // Visit the parts of rank i for its neighbours in the first step: visit(other, offset, bytes).
  template <typename Visit>
  void at_parts_of(int i, Visit visit) const {
    size_t from = 0;
    for (int other = 0; other < here_; ++other) {
      if (other == i) continue;
      const size_t bytes = rows_[at(i)][at(ranks_[at(other)])].sent;
      if (bytes > 0) visit(other, from, bytes);
      from += bytes;
    }
  }

  bool is_short(int i) const {
    size_t all = 0;
    for (int other = 0; other < here_; ++other) {
      const size_t bytes = other == i ? 0 : rows_[at(i)][at(ranks_[at(other)])].sent;
      if (bytes > kShort) return false;
      all += bytes;
    }
    return all <= kShort;
  }

  void staged(size_t longest) {
    // A slot holds a piece for each neighbour; pieces start on cache lines.
    const size_t piece =
        std::max<size_t>(group_.chunk_bytes() / at(here_ - 1), kSmallestPiece) & ~size_t{63};
    const auto place = [&](int owner, int reader) {
      return at(reader < owner ? reader : reader - 1) * piece;
    };
    const uint32_t steps = static_cast<uint32_t>((longest + piece - 1) / piece);
    const uint32_t first = group_.take_steps(kInputs, steps);
    uint32_t posted = 0;
    for (uint32_t s = 0; s < steps; ++s) {
      for (; posted < std::min(steps, s + 2); ++posted) {  // one step ahead of the readers
        group_.await_free(kInputs, first + posted);
        unsigned char *slot = group_.mine().slot(kInputs, first + posted);
        for (int k = 1; k < here_ && !is_short(me_); ++k) {
          const int other = (me_ + k) % here_;
          const Span part = piece_of(parts_.sent[at(ranks_[at(other)])], piece, posted);
          if (part.bytes) group_.slots.write(slot + place(me_, other), part.data, part.bytes);
        }
        group_.post(kInputs, first + posted);
      }
      for (int k = 1; k < here_; ++k) {
        const int other = (me_ + k) % here_;
        const Span part = piece_of(received(other), piece, s);
        if (part.bytes == 0 || is_short(other)) continue;
        group_.await_post(kInputs, first + s, other);
        copy(part.data,
             group_.neighbour(other).segment->slot(kInputs, first + s) + place(other, me_),
             part.bytes, stream_);
      }
      group_.consume(kInputs, first + s);
    }
  }

  Group &group_;
  const Parts &parts_;
  const std::vector<int> &ranks_;
  const int here_, me_;
  bool stream_ = false;
  std::vector<Row> rows_;  // by index on the node
  uint32_t step_ = 0;
};

// --- between nodes -------------------------------------------------------------------------------

// Step k transfers one piece of every part from this node to another one, and from a third to this:
// all nodes send and receive as much at any time. A message holds the pieces of one sender for all
// ranks of a node, one after the other.
class BetweenNodes {
 public:
  BetweenNodes(Group &group, const Parts &parts, const std::vector<Row> &rows)
      : group_(group),
        parts_(parts),
        rows_(rows),
        here_(group.ranks_here()),
        me_(group.topology().local),
        shifts_(group.topology().node_count() - 1),
        leads_(group.topology().leads()) {
    const size_t most = most_ranks_on_a_node(group);
    piece_ = std::min(group.node_chunk_bytes(), kSlotBytes / (most * most));
    if (piece_ > 64) piece_ &= ~size_t{63};
    uint64_t longest = 0;
    for (int i = 0; i < here_; ++i)
      for (int r = 0; r < group.size(); ++r) {
        if (group.topology().node_of[at(r)] == group.topology().node) continue;
        longest = std::max({longest, rows[at(i)][at(r)].sent, rows[at(i)][at(r)].received});
      }
    const size_t pieces = (longest + piece_ - 1) / piece_;
    steps_ = static_cast<uint32_t>(pieces * at(shifts_));
    if (here_ > 1) first_outbox_ = group.take_steps(kResults, steps_);
    if (here_ > 1) first_landing_ = group.take_steps(kFromLeader, steps_);
    sent_.resize(steps_);
    received_.resize(steps_);
  }

  // Leader only: compare the sizes of this node's transfers with those of the other nodes.
  void confirm(Opening &opening) {
    std::vector<std::vector<uint64_t>> mine(at(shifts_)), theirs(at(shifts_));
    std::vector<Request> sent(at(shifts_)), received(at(shifts_));
    for (int shift = 1; shift <= shifts_; ++shift) {
      const size_t s = at(shift - 1);
      for (int i = 0; i < here_; ++i)
        for (const int r : ranks_of(shift)) mine[s].push_back(rows_[at(i)][at(r)].sent);
      theirs[s].resize(at(here_) * ranks_of(-shift).size());
      group_.net().post_send(node_at(group_, shift), mine[s].data(),
                             mine[s].size() * sizeof(uint64_t), &sent[s]);
      group_.net().post_receive(node_at(group_, -shift), theirs[s].data(),
                                theirs[s].size() * sizeof(uint64_t), &received[s]);
    }
    opening.confirm();
    for (int shift = 1; shift <= shifts_; ++shift) {
      const size_t s = at(shift - 1);
      group_.await(received[s]);
      const std::vector<int> &senders = ranks_of(-shift);
      for (size_t j = 0; j < senders.size(); ++j)
        for (int i = 0; i < here_; ++i)
          group_.compare_sizes(senders[j], theirs[s][j * at(here_) + at(i)],
                               rows_[at(i)][at(senders[j])].received, group_.neighbour(i).rank);
      group_.await(sent[s]);
    }
  }

  void start() { begin_until(0); }

  void finish() {
    for (uint32_t k = 0; k < steps_; ++k) {
      begin_until(k);
      complete(k);
    }
  }

 private:
  const std::vector<int> &ranks_of(int shift) const {
    return group_.topology().nodes[at(node_at(group_, shift))];
  }
  int shift_of(uint32_t k) const {
    return static_cast<int>(k % static_cast<uint32_t>(shifts_)) + 1;
  }
  size_t index_of(uint32_t k) const { return k / static_cast<uint32_t>(shifts_); }

  void begin_until(uint32_t k) {
    for (; begun_ < std::min(steps_, k + kAhead); ++begun_) {
      if (leads_) receive(begun_);
      send(begun_);
    }
  }

  void receive(uint32_t k) {
    if (here_ > 1) group_.await_free(kFromLeader, first_landing_ + k);
    const int from = node_at(group_, -shift_of(k));
    const std::vector<int> &senders = ranks_of(-shift_of(k));
    received_[k].resize(senders.size());
    size_t place = 0;
    for (size_t j = 0; j < senders.size(); ++j) {
      const size_t bytes = arriving(k, senders[j]);
      char *to = here_ > 1 ? landing(k) + place
                           : piece_of(parts_.received[at(senders[j])], piece_, index_of(k)).data;
      if (bytes)
        group_.net().post_receive(from, to, bytes, &received_[k][j]);
      else
        received_[k][j].done = true;
      place += bytes;
    }
  }

  void send(uint32_t k) {
    const std::vector<int> &readers = ranks_of(shift_of(k));
    const auto part = [&](int rank) {
      return piece_of(parts_.sent[at(rank)], piece_, index_of(k));
    };
    if (here_ > 1) group_.await_free(kResults, first_outbox_ + k);
    // A leader whose piece for this node has one reader sends it from its memory.
    const char *own = nullptr;
    if (leads_ && readers.size() == 1) {
      own = part(readers[0]).data;
    } else {
      unsigned char *slot = group_.mine().slot(kResults, first_outbox_ + k);
      own = reinterpret_cast<const char *>(slot);
      size_t place = 0;
      for (const int rank : readers) {
        copy(slot + place, part(rank).data, part(rank).bytes, false);
        place += part(rank).bytes;
      }
    }
    if (!leads_) {
      group_.post(kResults, first_outbox_ + k);
      return group_.consume(kResults, first_outbox_ + k);  // only the leader reads other slots
    }
    const int to = node_at(group_, shift_of(k));
    sent_[k].resize(at(here_));
    for (int i = 0; i < here_; ++i) {
      size_t bytes = 0;
      for (const int rank : readers)
        bytes += piece_size(rows_[at(i)][at(rank)].sent, piece_, index_of(k));
      if (bytes == 0) {
        sent_[k][at(i)].done = true;
        continue;
      }
      if (i != me_) group_.await_post(kResults, first_outbox_ + k, i);
      const void *data = i == me_ ? static_cast<const void *>(own)
                                  : group_.neighbour(i).segment->slot(kResults, first_outbox_ + k);
      group_.net().post_send(to, data, bytes, &sent_[k][at(i)]);
    }
  }

  void complete(uint32_t k) {
    if (leads_)
      for (const Request &request : received_[k]) group_.await(request);
    if (here_ > 1) {
      if (leads_)
        group_.post(kFromLeader, first_landing_ + k);
      else
        group_.await_post(kFromLeader, first_landing_ + k, 0);
      const char *from = landing(k);
      for (const int sender : ranks_of(-shift_of(k)))
        for (int i = 0; i < here_; ++i) {
          const size_t bytes = piece_size(rows_[at(i)][at(sender)].received, piece_, index_of(k));
          if (i == me_)
            copy(piece_of(parts_.received[at(sender)], piece_, index_of(k)).data, from, bytes,
                 false);
          from += bytes;
        }
      group_.consume(kFromLeader, first_landing_ + k);
    }
    if (!leads_) return;
    for (const Request &request : sent_[k]) group_.await(request);
    if (here_ > 1) group_.consume(kResults, first_outbox_ + k);
  }

  // Bytes of the message of a sender in step k.
  size_t arriving(uint32_t k, int sender) const {
    size_t bytes = 0;
    for (int i = 0; i < here_; ++i)
      bytes += piece_size(rows_[at(i)][at(sender)].received, piece_, index_of(k));
    return bytes;
  }

  char *landing(uint32_t k) {
    return reinterpret_cast<char *>(group_.leader().slot(kFromLeader, first_landing_ + k));
  }

  Group &group_;
  const Parts &parts_;
  const std::vector<Row> &rows_;
  const int here_, me_, shifts_;
  const bool leads_;
  size_t piece_;  // bytes of a part in a step
  uint32_t steps_ = 0, begun_ = 0, first_outbox_ = 0, first_landing_ = 0;
  std::vector<std::vector<Request>> sent_, received_;
};

void exchange(Group &group, const Parts &parts) {
  const Span &from = parts.sent[at(group.rank())], &to = parts.received[at(group.rank())];
  if (from.bytes && from.data != to.data) copy(to.data, from.data, from.bytes, false);
  if (group.size() == 1) return;
  check_limits(group);
  std::optional<Opening> opening;
  std::optional<BetweenNodes> between;
  WithinNode within(group, parts);
  const bool nodes = group.topology().node_count() > 1;
  if (nodes) opening.emplace(group, false);
  within.swap_rows();
  if (nodes) {
    between.emplace(group, parts, within.rows());
    if (group.topology().leads()) between->confirm(*opening);
    between->start();
  }
  within.run();
  if (nodes) between->finish();
  if (nodes) group.path = "nodes";
}

Parts parts_of(const nlc_part *sends, const nlc_part *receives, int size, size_t element) {
  Parts parts;
  for (int r = 0; r < size; ++r) {
    const auto span = [&](const nlc_part &part) {
      return Span{static_cast<char *>(part.data), part.count * element};
    };
    parts.sent.push_back(span(sends[r]));
    parts.received.push_back(receives ? span(receives[r]) : Span{nullptr, 0});
  }
  return parts;
}

}  // namespace

void exchange(Group &group, const nlc_call &call) {
  exchange(group, parts_of(call.sends, call.receives, group.size(), element_bytes(call.dtype)));
}

void reduce_scatter_uneven(Group &group, const nlc_call &call) {
  const size_t own = call.sends[group.rank()].count, bytes = own * element_bytes(call.dtype);
  Parts parts = parts_of(call.sends, nullptr, group.size(), element_bytes(call.dtype));
  const Scratch contributions(bytes * at(group.size()));
  std::vector<const void *> sources;
  for (int r = 0; r < group.size(); ++r) {
    Span &place = parts.received[at(r)];
    place = r == group.rank() ? parts.sent[at(r)]
                              : Span{contributions.data() + bytes * at(r), bytes};
    sources.push_back(place.data);
  }
  exchange(group, parts);
  if (own)
    reduce(call.dtype, call.reduce, sources.data(), group.size(), call.output, own, call.scale,
           false);
}

void reduce_to_root(Group &group, const nlc_call &call) {
  if (call.root == group.rank()) return all_reduce(group, call);
  const size_t bytes = call.count * element_bytes(call.dtype);
  const Scratch scratch(bytes);
  copy(scratch.data(), call.output, bytes, false);
  nlc_call on_copy = call;
  on_copy.output = scratch.data();
  all_reduce(group, on_copy);
}

}  // namespace nlc
