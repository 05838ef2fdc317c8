// The messages between this rank and one other rank, in both directions (see mailbox.h).
//
// A sender announces a message by an envelope. The receiver answers: "grant" when a receive matches
// a message whose data is still missing, "done" when it has the data. Granted messages follow each
// other in the order of their grants.
#pragma once

#include <poll.h>

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mail_memory.h"
#include "tcp_handshake.h"
#include "trace.h"

namespace nlc {

class Mailbox;

// One send or receive.
struct Transfer {
  bool sends;
  int rank;  // the other one; kAnyRank until a message of any rank matches
  int64_t tag;
  char *data;
  uint64_t bytes;
  int dtype;
  uint64_t sequence;  // of the transfers of this rank, for messages
  int64_t timeout_ms;
  Clock::time_point deadline;
  nlc_done done;  // called when the transfer has ended
  void *context;
  bool matched = false;  // receive: with a message
  uint64_t number = 0;   // of the message
  uint64_t moved = 0;    // bytes
  const char *path = "";
  bool ended = false;
  nlc_status status = NLC_OK;
  std::string error{};
  std::optional<Trace> trace{};
};
using TransferPtr = std::shared_ptr<Transfer>;

// Why no more messages can be exchanged with a rank.
struct LaneEnd {
  nlc_status status;
  std::string text;
  bool in_order;  // the rank has left the group, and did not die
};

class Lane {
 public:
  Lane(Mailbox &box, int rank) : rank(rank), box_(box) {}
  virtual ~Lane() = default;
  const int rank;
  int transfers = 0;           // with this rank, that have not ended
  std::optional<LaneEnd> end;  // set by a lane, or by a receive that does not fit
  bool closed = false;         // all transfers with this rank have ended for this reason

  void send(const TransferPtr &transfer) {
    transfer->number = ++last_number_;
    unannounced_.push_back(transfer);
    sends_[transfer->number] = transfer;
  }
  // A receive matches a message whose data must be sent, or whose data has been copied.
  void grant(const TransferPtr &receive) {
    incoming_.push_back(receive);
    answers_.push_back({{receive->number, Word::kGrant, 0}, nullptr});
  }
  void acknowledge(const TransferPtr &receive) {
    answers_.push_back({{receive->number, Word::kDone, 0}, receive});
  }

  // Move whatever can move; return true if anything did.
  virtual bool move() = 0;
  // Add what the lane waits for; the doorbell of this rank is always waited for.
  virtual void watch(std::vector<pollfd> &) const {}
  // Look for signs of the other rank's end that move() does not see; called every few milliseconds.
  virtual void look() {}
  // Tell the other rank that this one gives up, or that it leaves in order (NLC_OK).
  virtual void leave(nlc_status status, const std::string &text) = 0;
  virtual void adopt(tcp::Socket) {}  // a connection from the other rank
  virtual bool is_local() const = 0;

 protected:
  struct Reply {
    Answer answer;
    TransferPtr completes;  // when the answer is sent
  };

  void take(const Answer &answer);
  void died();

  Mailbox &box_;
  uint64_t last_number_ = 0;
  std::deque<TransferPtr> unannounced_;
  std::map<uint64_t, TransferPtr> sends_;  // that have not ended
  std::deque<TransferPtr> outgoing_;       // granted sends
  std::deque<TransferPtr> incoming_;       // granted receives
  std::deque<Reply> answers_;
};

// The lane has ended already if the other rank's memory is gone.
std::unique_ptr<Lane> make_local_lane(Mailbox &box, int rank);
std::unique_ptr<Lane> make_tcp_lane(Mailbox &box, int rank);

}  // namespace nlc
