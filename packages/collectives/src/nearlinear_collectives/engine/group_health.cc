// The slow path of waiting: detect dead and late ranks, and report them.
#include <algorithm>
#include <cstring>

#include "group.h"
#include "mailbox.h"
#include "reduce.h"
#include "trace.h"

namespace nlc {

void Group::check_peers(int awaited) {
  const Clock::time_point now = Clock::now();
  if (now - last_look_ < std::chrono::milliseconds(2)) return;
  last_look_ = now;
  if (aborted_.load(std::memory_order_acquire)) fail(NLC_ABORTED, abort_reason_);
  for (int i = 0; i < ranks_here(); ++i) {
    const Segment &other = *neighbour(i).segment;
    if (i == roster_.topology.local) continue;
    const uint32_t status = other.failed.load(std::memory_order_acquire);
    if (status != NLC_OK) fail_with(static_cast<nlc_status>(status), other.reason);
    if (neighbour(i).rank == awaited && other.closed.load(std::memory_order_acquire))
      fail(NLC_PEER_DIED, roster_.rank_text(awaited) + " has left the group");
  }
  fail_if_any_died();
  if (now >= deadline_) time_out(awaited);
  if (net_ && now + std::chrono::milliseconds(call_timeout_ms_ / 2) >= deadline_)
    tell_nodes(awaited >= 0 ? roster_.topology.node : net_->awaited());
}

void Group::fail_if_any_died() {
  for (const int dead : liveness_->dead()) {
    const Segment &other = *neighbour(roster_.topology.local_of(dead)).segment;
    // A rank that closed the group and exited is an error only for ranks that wait for it.
    if (!other.closed.load(std::memory_order_acquire))
      fail(NLC_PEER_DIED, roster_.rank_text(dead) + " died");
  }
}

// Ranks that learned of a death in a message may have gone on to other calls: it is the cause.
void Group::fail_mismatch(const std::string &difference) {
  fail_if_any_died();
  if (const auto death = death_in_messages()) fail(death->status, death->text);
  fail(NLC_MISMATCH, difference);
}

void Group::tell_nodes(int awaited) {
  if (awaited == reported_) return;
  reported_ = awaited;
  net_->tell_awaited(awaited);
}

int Group::slowest_neighbour() {
  int slowest = -1;
  auto progress = [this](int i) {
    const Segment &other = *neighbour(i).segment;
    uint64_t steps = 0;
    for (const RingCounters &ring : other.rings) steps += ring.posted.load() + ring.consumed.load();
    return std::pair(other.entered.load(std::memory_order_acquire), steps);
  };
  for (int i = 0; i < ranks_here(); ++i)
    if (i != roster_.topology.local && (slowest < 0 || progress(i) < progress(slowest)))
      slowest = i;
  return slowest;
}

void Group::time_out(int awaited) {
  const int slowest = slowest_neighbour();
  int rank = awaited;
  std::string where;
  if (slowest >= 0 && awaited >= 0) {
    const Segment &other = *neighbour(slowest).segment;
    rank = neighbour(slowest).rank;
    const uint64_t entered = other.entered.load(), finished = other.finished.load();
    where = entered < sequence_
                ? format("; it has not called it: its last operation was #%llu (%s)",
                         static_cast<unsigned long long>(entered),
                         entered == finished ? "done" : "unfinished")
                : "; it is in the same operation, stuck or stopped";
  }
  if (rank < 0 && net_) {
    const int awaits = net_->awaited();
    if (awaits >= 0) {
      const int node = net_->stuck_behind(awaits);
      rank = roster_.topology.nodes[static_cast<size_t>(node)][0];
      where = "; it leads its node: it, another rank there or its link is stuck";
    }
  }
  const std::string who = rank >= 0 ? roster_.rank_text(rank) : "another node";
  fail(NLC_TIMEOUT, format("timeout after %.3g s: %s made no progress%s",
                           static_cast<double>(call_timeout_ms_) / 1000.0, who.c_str(),
                           where.c_str()));
}

// A rank whose memory cannot be opened has died, or gave up because another one did.
void Group::fail_forming(int rank, const Failure &failure) {
  if (failure.status != NLC_PEER_DIED)
    fail(failure.status, roster_.rank_text(rank) + ": " + failure.what());
  for (const int other : roster_.topology.neighbours())
    if (is_dead(roster_.peer(other)))
      fail(NLC_PEER_DIED, roster_.rank_text(other) + " died while the group was being formed");
  fail(NLC_PEER_DIED,
       roster_.rank_text(rank) + " gave up while the group was being formed; see its error");
}

void Group::fail(nlc_status status, const std::string &reason) {
  fail_with(status, current_.kind ? call_text(current_) + ": " + reason : reason);
}

void Group::fail_with(nlc_status status, const std::string &text) {
  publish_failure(status, text);
  throw Failure(status, roster_.failure_text(own_info_.rank, text));
}

void Group::publish_failure(nlc_status status, const std::string &text) {
  failure_text_ = text;
  failure_status_ = status;
  std::strncpy(own_->reason, text.c_str(), sizeof own_->reason - 1);
  own_->failed.store(static_cast<uint32_t>(status), std::memory_order_release);
  if (net_) net_->give_up(text);
}

void Group::abort(const char *reason) {
  abort_reason_ = reason;
  aborted_.store(true, std::memory_order_release);
  close_mail(NLC_ABORTED, reason,
             roster_.peers.empty() ? reason : roster_.rank_text(rank()) + ": " + reason);
}

std::string Group::call_text(const CallSignature &call) const {
  std::string text =
      format("%s #%llu", kind_name(call.kind), static_cast<unsigned long long>(call.sequence));
  if (call.kind == NLC_BARRIER) return text;
  const bool per_rank = call.kind == NLC_ALL_GATHER || call.kind == NLC_REDUCE_SCATTER ||
                        call.kind == NLC_GATHER || call.kind == NLC_SCATTER;
  text += format(" of %s%s (%s", bytes_text(call.count * element_bytes(call.dtype)).c_str(),
                 per_rank                       ? " per rank"
                 : call.kind == NLC_ALL_TO_ALL ? " sent"
                                                : "",
                 count_text(call.count, call.dtype).c_str());
  if (reduces(call.kind)) text += format(", %s", reduce_name(call.reduce));
  if (call.scale != 1.0) text += format(", times %.9g", call.scale);
  if (has_root(call.kind)) text += format(", root %d", call.root);
  return text + ")";
}

}  // namespace nlc
