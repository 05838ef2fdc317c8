// Messages between two ranks of a group: send and receive, by tag, from one rank or from any.
//
// A receive matches the first message of its source and tag that no earlier receive has matched. A
// send ends when the data is in the receiver's memory. Short messages travel with their envelope.
// Others are read from the sender's memory if that is a shared pool, or else sent in chunks after a
// receive has matched, so that nothing is buffered.
//
// One thread at a time drives all transfers: one that waits for a transfer, or else a thread of the
// mailbox, which takes over soon after a transfer was posted. A mismatch or a timeout ends all
// transfers with that rank, and a death all transfers.
#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core_spread.h"
#include "doorbell.h"
#include "lane.h"
#include "liveness.h"
#include "memory.h"
#include "roster.h"
#include "slot_writer.h"
#include "sync.h"

namespace nlc {

constexpr int kAnyRank = NLC_ANY_RANK;

// What a mailbox needs to know of its group.
struct MailSettings {
  Roster roster;
  std::vector<std::shared_ptr<Mapping>> segments;  // of the node's ranks
  std::vector<std::shared_ptr<Mapping>> pools;     // likewise; nullptr in this process
  std::shared_ptr<Liveness> liveness;              // likewise
  tcp::Listener listener;                          // for other nodes; empty on one node
  tcp::Party party;                                // of all ranks
  SpinBudget spin_budget;
  bool own_core;  // every rank of the node has a core
};

class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  explicit Mailbox(MailSettings settings);

  // Post a call of kind NLC_SEND or NLC_RECEIVE. Throws Failure if it cannot be posted.
  TransferPtr post(const nlc_call &call, int64_t timeout_ms, nlc_done done, void *context);
  // Make progress until the transfer has ended, or for timeout_ms (0: without a limit).
  nlc_status drive(const Transfer &transfer, int64_t timeout_ms);
  // End all transfers with this reason, and refuse others. `to_others` is told to ranks that have
  // transfers with this one; "": it leaves in order. Returns after the callbacks, unless it is
  // called by one.
  void close(nlc_status status, const std::string &reason, const std::string &to_others);
  // The death that has ended all transfers, if any.
  std::optional<LaneEnd> death();

  // --- for the lanes, with the mutex held; ends are in mailbox_health.cc -------------------------
  const MailSettings &settings() const { return settings_; }
  const Roster &roster() const { return settings_.roster; }
  int rank() const { return roster().topology.rank; }
  Mail &own() { return *reinterpret_cast<Mail *>(own_->base()); }
  const tcp::Party &party() const { return settings_.party; }
  Segment &segment(int local) const {
    return *reinterpret_cast<Segment *>(settings_.segments[static_cast<size_t>(local)]->base());
  }
  SlotWriter &slots() { return slots_; }
  size_t stream_bytes() const { return stream_bytes_; }
  // A message was announced; `data` is that of a short one.
  void arrive(Lane &lane, const Envelope &envelope, const void *data);
  std::string told(const LaneEnd &end) const;  // to the other rank of a lane
  void complete(const TransferPtr &transfer);

 private:
  struct Arrival {  // a message that no receive has matched yet
    Lane *lane;
    Envelope envelope;
    std::string data;
  };

  Lane &lane_to(int rank);
  void open_all_lanes();
  void accept(const TransferPtr &receive, Lane &lane, const Envelope &envelope, const void *data);
  void refuse_mismatch(const Transfer &receive, Lane &lane, const Envelope &envelope);
  bool progress();
  bool greet_guests();
  bool is_used(const Lane &lane) const {
    return !lane.closed && (any_rank_ > 0 || lane.transfers > 0);
  }
  bool waits_for_network() const;
  int first_dead();
  void check_health(Clock::time_point now);
  void close_lane(Lane &lane);
  void finish(const TransferPtr &transfer, nlc_status status, const std::string &text);
  void fail_all(nlc_status status, const std::string &text, const std::string &to_others);
  void deliver(std::unique_lock<std::mutex> &lock);
  void watch_guests(std::vector<pollfd> &waits) const;
  void tell_latecomers(std::unique_lock<std::mutex> &lock);
  void ring_own();
  void sleep(std::unique_lock<std::mutex> &lock, uint32_t seen, int ms);
  void drive_until(std::unique_lock<std::mutex> &lock, const Transfer *transfer,
                   Clock::time_point until);
  void serve();
  std::string text_of(const Transfer &transfer) const;
  std::string late_text(const Transfer &transfer) const;

  MailSettings settings_;
  std::shared_ptr<Mapping> own_;  // of this rank's Mail
  SlotWriter slots_;
  size_t stream_bytes_;
  Doorbell doorbell_;

  std::mutex mutex_;  // of everything below
  std::vector<std::unique_ptr<Lane>> lanes_;  // by rank, opened on first use
  std::list<TransferPtr> transfers_;          // that have not ended, in the order of posting
  std::list<Arrival> arrivals_;
  std::vector<TransferPtr> ended_;  // whose callbacks are due
  std::list<tcp::Guest> guests_;
  uint64_t posted_ = 0;
  int any_rank_ = 0;  // receives from any rank
  Clock::time_point last_look_{};
  CoreSpread core_spread_;
  std::string closed_;              // reason why nothing can be posted any more
  std::optional<LaneEnd> failure_;  // of which all ranks are told that connect

  std::condition_variable changed_, server_;
  std::thread::id driver_{};  // thread that drives, if any
  int waiting_ = 0;           // threads in drive()
  bool serving_ = false;      // the mailbox's thread exists
  bool server_sleeps_ = false;
  const int pid_ = ::getpid();
};

// Map the Mail of a rank of this process.
std::shared_ptr<Mapping> map_mail_here(const PeerInfo &peer, int ranks_here);
// Forget the Mail of a rank of this process, whose descriptor is about to be closed.
void forget_mail(const PeerInfo &own);

}  // namespace nlc
