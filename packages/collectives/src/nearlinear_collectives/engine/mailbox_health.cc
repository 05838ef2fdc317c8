// Ends of messages: completed, failed, late, or of ranks that died; and the words for them.
#include "mailbox.h"
#include "reduce.h"

namespace nlc {

void Mailbox::complete(const TransferPtr &transfer) { finish(transfer, NLC_OK, ""); }

void Mailbox::finish(const TransferPtr &transfer, nlc_status status, const std::string &text) {
  if (transfer->ended) return;
  transfer->ended = true;
  transfer->status = status;
  --(transfer->rank == kAnyRank ? any_rank_ : lane_to(transfer->rank).transfers);
  if (status == NLC_OK) {
    transfer->trace->done(transfer->path);
  } else {
    transfer->error = roster().failure_text(rank(), text);
    transfer->trace->failed(text);
  }
  transfers_.remove(transfer);
  ended_.push_back(transfer);
}

void Mailbox::deliver(std::unique_lock<std::mutex> &lock) {
  if (ended_.empty()) return;
  const std::vector<TransferPtr> due = std::move(ended_);
  ended_.clear();
  if (waiting_ > 0) changed_.notify_all();
  lock.unlock();
  for (const TransferPtr &transfer : due)
    transfer->done(transfer->context, transfer->status, transfer->error.c_str());
  lock.lock();
}

// End all transfers of a lane that has ended. A death ends those with other ranks too, and these
// learn of it: they may wait for a message that depends on one of the dead rank.
void Mailbox::close_lane(Lane &lane) {
  const LaneEnd end = *lane.end;
  if (end.status == NLC_PEER_DIED && !end.in_order)
    return fail_all(end.status, end.text, end.text);
  lane.closed = true;
  lane.leave(end.status, told(end));
  for (const TransferPtr &one : std::list<TransferPtr>(transfers_))
    if (one->rank == lane.rank || (one->rank == kAnyRank && !end.in_order))
      finish(one, end.status, text_of(*one) + ": " + end.text);
  arrivals_.remove_if([&](const Arrival &one) { return one.lane == &lane; });
}

void Mailbox::fail_all(nlc_status status, const std::string &text, const std::string &to_others) {
  if (closed_.empty()) closed_ = text;
  if (!failure_ && !to_others.empty()) failure_ = LaneEnd{status, to_others, false};
  for (const auto &lane : lanes_)
    if (lane && !lane->closed) {
      lane->end = LaneEnd{status, to_others, false};
      lane->closed = true;
      lane->leave(to_others.empty() ? NLC_OK : status, to_others);
    }
  for (const TransferPtr &one : std::list<TransferPtr>(transfers_))
    finish(one, status, text_of(*one) + ": " + text);
  arrivals_.clear();
}

// A receive that matches another message than it expects.
void Mailbox::refuse_mismatch(const Transfer &receive, Lane &lane, const Envelope &envelope) {
  const auto text = [](uint64_t bytes, int dtype) {
    return count_text(bytes / element_bytes(dtype), dtype);
  };
  lane.end = LaneEnd{
      NLC_MISMATCH,
      format("rank %lld sends %s with tag %lld, and rank %lld expects %s",
             roster().global(lane.rank), text(envelope.bytes, envelope.dtype).c_str(),
             static_cast<long long>(envelope.tag), roster().global(rank()),
             text(receive.bytes, receive.dtype).c_str()),
      false};
}

std::string Mailbox::told(const LaneEnd &end) const {
  if (end.status != NLC_TIMEOUT) return end.text;
  return roster().rank_text(rank()) + " gave up: " + end.text;
}

// A rank of this node that died, and did not leave the group before; or -1.
int Mailbox::first_dead() {
  for (const int rank : settings_.liveness->dead())
    if (!segment(roster().topology.local_of(rank)).closed.load(std::memory_order_acquire))
      return rank;
  return -1;
}

void Mailbox::check_health(Clock::time_point now) {
  last_look_ = now;
  if (const int dead = first_dead(); dead >= 0) {
    const std::string text = roster().rank_text(dead) + " died";
    return fail_all(NLC_PEER_DIED, text, text);
  }
  size_t others = 0, left = 0;
  for (const auto &lane : lanes_) {
    if (!lane) continue;
    ++others;
    if (is_used(*lane)) {
      lane->look();
      // Its last messages may have arrived in the meantime.
      if (lane->end && lane->end->in_order) {
        std::optional<LaneEnd> end;
        std::swap(end, lane->end);
        while (lane->move() && !lane->end) {
        }
        if (!lane->end) std::swap(end, lane->end);
      }
      if (lane->end) close_lane(*lane);
    }
    left += lane->end.has_value();
  }
  if (any_rank_ > 0 && left == others)
    for (const TransferPtr &one : std::list<TransferPtr>(transfers_))
      if (one->rank == kAnyRank)
        finish(one, NLC_PEER_DIED, text_of(*one) + ": all other ranks have left the group");
  for (const TransferPtr &one : std::list<TransferPtr>(transfers_)) {
    if (one->ended || now < one->deadline) continue;
    const std::string text = late_text(*one);
    if (one->rank == kAnyRank) {
      finish(one, NLC_TIMEOUT, text_of(*one) + ": " + text);
      continue;
    }
    Lane &lane = lane_to(one->rank);
    lane.end = LaneEnd{NLC_TIMEOUT, text, false};
    close_lane(lane);
  }
}

std::string Mailbox::text_of(const Transfer &transfer) const {
  const std::string other =
      transfer.rank == kAnyRank ? "any rank" : format("rank %lld", roster().global(transfer.rank));
  return format("%s #%llu of %s (%s, tag %lld) %s %s", transfer.sends ? "send" : "receive",
                static_cast<unsigned long long>(transfer.sequence),
                bytes_text(transfer.bytes).c_str(),
                count_text(transfer.bytes / element_bytes(transfer.dtype), transfer.dtype).c_str(),
                static_cast<long long>(transfer.tag), transfer.sends ? "to" : "from",
                other.c_str());
}

std::string Mailbox::late_text(const Transfer &transfer) const {
  const double seconds = static_cast<double>(transfer.timeout_ms) / 1000;
  if (transfer.rank == kAnyRank)
    return format("timeout after %.3g s: no rank has sent a message with this tag", seconds);
  const char *why = transfer.sends     ? "it has not received the message"
                    : transfer.matched ? "it has not sent the whole message"
                                       : "it has not sent a message with this tag";
  return format("timeout after %.3g s: %s made no progress; %s", seconds,
                roster().rank_text(transfer.rank).c_str(), why);
}

std::optional<LaneEnd> Mailbox::death() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_ && failure_->status == NLC_PEER_DIED ? failure_ : std::nullopt;
}

}  // namespace nlc
