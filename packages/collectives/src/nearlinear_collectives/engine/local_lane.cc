// Messages with a rank of the same node, through shared memory.
#include <algorithm>
#include <cstring>

#include "arena.h"
#include "copy.h"
#include "mailbox.h"

namespace nlc {
namespace {

// Numbers of items in a ring only grow, and may wrap.
uint32_t waiting(const std::atomic<uint32_t> &written, const std::atomic<uint32_t> &read) {
  return written.load(std::memory_order_acquire) - read.load(std::memory_order_acquire);
}

void count(std::atomic<uint32_t> &items) {
  items.store(items.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

class LocalLane : public Lane {
 public:
  LocalLane(Mailbox &box, int rank) : Lane(box, rank) {
    const Topology &topology = box.roster().topology;
    const int local = topology.local_of(rank);
    const PeerInfo &peer = box.roster().peer(rank);
    in_this_process_ = peer.pid == ::getpid();
    segment_ = &box.segment(local);
    mine_ = &box.own().lanes[local];
    if (in_this_process_) {
      if (has_left()) return;  // its memory is closed
      whole_ = map_mail_here(peer, topology.ranks_here());
      mail_ = reinterpret_cast<Mail *>(whole_->base());
      theirs_ = &mail_->lanes[topology.local];
      return;
    }
    try {
      const Fd fd = open_memory_of(peer.pid, peer.mail_fd);
      start_ = map_memory(fd.get(), kLargestPage, true);
      lane_ = map_memory(fd.get(), sizeof(MailLane), true, Mail::lane_offset(topology.local));
    } catch (const Failure &failure) {
      if (failure.status != NLC_PEER_DIED) throw;
      if (!has_left()) died();
      return;
    }
    mail_ = reinterpret_cast<Mail *>(start_.base());
    theirs_ = reinterpret_cast<MailLane *>(lane_.base());
  }

  bool is_local() const override { return true; }

  bool move() override {
    bool moved = announce();
    moved |= reply();
    moved |= read_answers();
    moved |= send_chunks();
    moved |= read_envelopes();
    moved |= receive_chunks();
    return moved;
  }

  void look() override {
    // A write orders earlier reads of the sender's memory (Mailbox::accept) before it.
    const uint32_t status = theirs_->failed.fetch_or(0, std::memory_order_acq_rel);
    if (status != NLC_OK)
      end = LaneEnd{static_cast<nlc_status>(status), theirs_->reason, false};
    else
      has_left();
  }

  void leave(nlc_status status, const std::string &text) override {
    if (status != NLC_OK && mine_->failed.load(std::memory_order_relaxed) == NLC_OK) {
      std::strncpy(mine_->reason, text.c_str(), sizeof mine_->reason - 1);
      mine_->failed.store(static_cast<uint32_t>(status), std::memory_order_release);
    }
    if (mail_) ring();
  }

 private:
  bool has_left() {
    const bool left = segment_->closed.load(std::memory_order_acquire);
    // Not in order if a rank died, and a collective noticed it.
    if (left && segment_->failed.load(std::memory_order_acquire) == NLC_PEER_DIED)
      end = LaneEnd{NLC_PEER_DIED, segment_->reason, false};
    else if (left)
      end = LaneEnd{NLC_PEER_DIED, box_.roster().rank_text(rank) + " has left the group", true};
    return left;
  }

  void ring() {
    mail_->bell.add();
    if (!mail_->listening.load(std::memory_order_seq_cst)) return;
    if (!opened_) {
      opened_ = true;
      try {
        doorbell_.open(box_.roster().peer(rank).pid, mail_->doorbell.load());
      } catch (const Failure &) {
        return;  // the process is gone, which look() sees
      }
    }
    doorbell_.notify(mail_->listening);
  }

  bool announce() {
    bool moved = false;
    for (; !unannounced_.empty(); moved = true) {
      const uint32_t next = mine_->envelopes_posted.load(std::memory_order_relaxed);
      if (next - theirs_->envelopes_read.load(std::memory_order_acquire) == kEnvelopes) break;
      const TransferPtr &send = unannounced_.front();
      auto &place = mine_->envelopes[next % kEnvelopes];
      place.envelope = {send->tag, send->number, send->bytes, kLater, send->dtype, 0};
      if (send->bytes <= kInside) {
        place.envelope.place = kWithIt;
        if (send->bytes) std::memcpy(place.data, send->data, send->bytes);
      } else if (in_this_process_) {
        place.envelope.place = static_cast<int64_t>(reinterpret_cast<intptr_t>(send->data));
      } else {
        place.envelope.place = Arena::of_this_process().offset_of(send->data, send->bytes);
      }
      const int64_t where = place.envelope.place;
      send->path = where == kWithIt ? "with the envelope" : where == kLater ? "staged" : "pulled";
      unannounced_.pop_front();
      count(mine_->envelopes_posted);
      ring();
    }
    return moved;
  }

  bool reply() {
    bool moved = false;
    for (; !answers_.empty(); moved = true) {
      const uint32_t next = mine_->answers_posted.load(std::memory_order_relaxed);
      if (next - theirs_->answers_read.load(std::memory_order_acquire) == kAnswers) break;
      const Reply reply = std::move(answers_.front());
      answers_.pop_front();
      mine_->answers[next % kAnswers] = reply.answer;
      count(mine_->answers_posted);
      ring();
      if (reply.completes) box_.complete(reply.completes);
    }
    return moved;
  }

  bool read_answers() {
    bool moved = false;
    for (; waiting(theirs_->answers_posted, mine_->answers_read); moved = true) {
      const uint32_t next = mine_->answers_read.load(std::memory_order_relaxed);
      const Answer answer = theirs_->answers[next % kAnswers];
      count(mine_->answers_read);
      take(answer);
    }
    return moved;
  }

  bool send_chunks() {
    bool moved = false;
    for (uint32_t turn = 0; turn < kChunks && !outgoing_.empty(); ++turn, moved = true) {
      const uint32_t next = mine_->chunks_filled.load(std::memory_order_relaxed);
      if (next - theirs_->chunks_read.load(std::memory_order_acquire) == kChunks) break;
      Transfer &send = *outgoing_.front();
      const size_t bytes = std::min<size_t>(kChunkBytes, send.bytes - send.moved);
      box_.slots().write(mine_->chunks[next % kChunks], send.data + send.moved, bytes);
      send.moved += bytes;
      if (send.moved == send.bytes) outgoing_.pop_front();
      count(mine_->chunks_filled);
      if (box_.settings().own_core) ring();
    }
    // The other rank may need this core to read them.
    if (moved && !box_.settings().own_core) ring();
    return moved;
  }

  bool read_envelopes() {
    bool moved = false;
    for (; !end && waiting(theirs_->envelopes_posted, mine_->envelopes_read); moved = true) {
      const uint32_t next = mine_->envelopes_read.load(std::memory_order_relaxed);
      const auto &place = theirs_->envelopes[next % kEnvelopes];
      box_.arrive(*this, place.envelope, place.data);
      count(mine_->envelopes_read);
      reply();
    }
    return moved;
  }

  bool receive_chunks() {
    bool moved = false;
    for (uint32_t turn = 0; turn < kChunks && !incoming_.empty(); ++turn, moved = true) {
      if (!waiting(theirs_->chunks_filled, mine_->chunks_read)) break;
      const TransferPtr receive = incoming_.front();
      const uint32_t next = mine_->chunks_read.load(std::memory_order_relaxed);
      const size_t bytes = std::min<size_t>(kChunkBytes, receive->bytes - receive->moved);
      copy(receive->data + receive->moved, theirs_->chunks[next % kChunks], bytes,
           receive->bytes >= box_.stream_bytes());
      receive->moved += bytes;
      count(mine_->chunks_read);
      if (receive->moved < receive->bytes) {
        ring();
        continue;
      }
      incoming_.pop_front();
      acknowledge(receive);
      reply();
    }
    return moved;
  }

  std::shared_ptr<Mapping> whole_;  // of the other rank's Mail, in this process
  Mapping start_, lane_;            // parts of it, in another one
  const Segment *segment_;
  Mail *mail_ = nullptr;
  MailLane *mine_, *theirs_ = nullptr;
  bool in_this_process_ = false;
  Doorbell doorbell_;
  bool opened_ = false;
};

}  // namespace

std::unique_ptr<Lane> make_local_lane(Mailbox &box, int rank) {
  return std::make_unique<LocalLane>(box, rank);
}

}  // namespace nlc
