#include "mailbox.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstring>

#include "arena.h"
#include "copy.h"
#include "reduce.h"

namespace nlc {
namespace {

// Time that a thread which has posted a transfer has to wait for it, before the mailbox's own
// thread drives. A change of threads costs more than a short message.
constexpr std::chrono::microseconds kHeadStart{300};
constexpr int kDozes = 30;  // without work, before that thread has to be woken
constexpr std::chrono::milliseconds kLook{2};
constexpr std::chrono::milliseconds kFarewell{500};
constexpr int kSleepMs = 20;

MappingsHere &mails() {
  static auto *all = new MappingsHere();
  return *all;
}

}  // namespace

std::shared_ptr<Mapping> map_mail_here(const PeerInfo &peer, int ranks_here) {
  return mails().get(peer.nonce, [&] {
    return std::make_shared<Mapping>(map_memory(peer.mail_fd, Mail::bytes(ranks_here), true));
  });
}

void forget_mail(const PeerInfo &own) { mails().forget(own.nonce); }

// --- lanes ---------------------------------------------------------------------------------------

void Lane::take(const Answer &answer) {
  const auto found = sends_.find(answer.number);
  if (found == sends_.end()) return;
  const TransferPtr transfer = found->second;
  if (answer.word == Word::kGrant) return outgoing_.push_back(transfer);
  sends_.erase(found);
  box_.complete(transfer);
}

void Lane::died() {
  if (!end) end = LaneEnd{NLC_PEER_DIED, box_.roster().rank_text(rank) + " died", false};
}

Mailbox::Mailbox(MailSettings settings)
    : settings_(std::move(settings)),
      own_(map_mail_here(roster().peer(rank()), roster().topology.ranks_here())),
      slots_(settings_.own_core),
      stream_bytes_(stream_threshold(roster().topology.ranks_here())),
      lanes_(roster().peers.size()) {
  std::vector<Segment *> segments;
  for (int i = 0; i < roster().topology.ranks_here(); ++i) segments.push_back(&segment(i));
  core_spread_ =
      CoreSpread(std::move(segments), roster().topology.local, roster().peer(rank()).cores);
  doorbell_.create();
  own().doorbell.store(doorbell_.write_fd(), std::memory_order_release);
}

Lane &Mailbox::lane_to(int rank) {
  std::unique_ptr<Lane> &lane = lanes_[static_cast<size_t>(rank)];
  const Topology &topology = roster().topology;
  if (!lane) {
    const bool here = topology.node_of[static_cast<size_t>(rank)] == topology.node;
    lane = here ? make_local_lane(*this, rank) : make_tcp_lane(*this, rank);
  }
  return *lane;
}

void Mailbox::open_all_lanes() {
  for (int other = 0; other < roster().topology.size; ++other)
    if (other != rank()) lane_to(other);
}

// --- posting and matching ------------------------------------------------------------------------

TransferPtr Mailbox::post(const nlc_call &call, int64_t timeout_ms, nlc_done done, void *context) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool any = call.root == kAnyRank;
  auto transfer = std::make_shared<Transfer>(Transfer{
      call.kind == NLC_SEND, call.root, call.tag, static_cast<char *>(call.output),
      call.count * element_bytes(call.dtype), call.dtype, posted_ + 1, timeout_ms,
      after_ms(timeout_ms), done, context});
  const auto refuse = [&](nlc_status status, const std::string &why) {
    throw Failure(status, roster().failure_text(rank(), text_of(*transfer) + ": " + why));
  };
  if (!closed_.empty()) refuse(NLC_ABORTED, closed_);
  if (any) open_all_lanes();
  Lane *const lane = any ? nullptr : &lane_to(call.root);
  for (const auto &one : lanes_) {
    if (!one || !one->end || (lane && one.get() != lane)) continue;
    const LaneEnd &end = *one->end;
    // A rank that died may be the sender of a message from any rank; one that has left is not.
    if (end.status == NLC_PEER_DIED && (lane || !end.in_order)) refuse(end.status, end.text);
    if (lane) refuse(NLC_ABORTED, "the messages with this rank failed before: " + end.text);
  }

  if (!serving_) {
    std::thread([self = shared_from_this()] { self->serve(); }).detach();
    serving_ = true;
  }
  CallSignature signature{};
  signature.sequence = ++posted_;
  signature.kind = call.kind, signature.dtype = call.dtype, signature.count = call.count;
  signature.root = call.root;
  transfer->trace.emplace(roster().name, signature);
  transfers_.push_back(transfer);
  ++(any ? any_rank_ : lane->transfers);
  if (transfer->sends) {
    lane->send(transfer);
  } else {
    const auto found = std::find_if(arrivals_.begin(), arrivals_.end(), [&](const Arrival &one) {
      return one.envelope.tag == call.tag && (any || one.lane == lane);
    });
    if (found != arrivals_.end()) {
      const Arrival arrival = std::move(*found);
      arrivals_.erase(found);
      accept(transfer, *arrival.lane, arrival.envelope, arrival.data.data());
    }
  }
  progress();
  deliver(lock);
  if (transfer->ended) return transfer;
  if (driver_ != std::thread::id())
    ring_own();  // it may sleep without looking at this transfer's lane
  else if (server_sleeps_)
    server_.notify_one();
  return transfer;
}

void Mailbox::arrive(Lane &lane, const Envelope &envelope, const void *data) {
  for (const TransferPtr &receive : transfers_) {
    if (receive->sends || receive->matched || receive->tag != envelope.tag) continue;
    if (receive->rank != lane.rank && receive->rank != kAnyRank) continue;
    return accept(TransferPtr(receive), lane, envelope, data);
  }
  const char *bytes = static_cast<const char *>(data);
  const size_t kept = envelope.place == kWithIt ? envelope.bytes : 0;
  arrivals_.push_back({&lane, envelope, kept ? std::string(bytes, kept) : std::string()});
}

void Mailbox::accept(const TransferPtr &receive, Lane &lane, const Envelope &envelope,
                     const void *data) {
  if (receive->rank == kAnyRank) {
    receive->rank = lane.rank;
    --any_rank_;
    ++lane.transfers;
  }
  receive->matched = true;
  receive->number = envelope.number;
  if (envelope.bytes != receive->bytes || envelope.dtype != receive->dtype)
    return refuse_mismatch(*receive, lane, envelope);
  if (envelope.place == kWithIt) {
    if (envelope.bytes) std::memcpy(receive->data, data, envelope.bytes);
    receive->path = "with the envelope";
    return lane.acknowledge(receive);
  }
  if (envelope.place == kLater) {
    receive->path = lane.is_local() ? "staged" : "network";
    return lane.grant(receive);
  }
  const auto local = static_cast<size_t>(roster().topology.local_of(lane.rank));
  const std::shared_ptr<Mapping> &pool = settings_.pools[local];
  const char *from = pool ? pool->base() + envelope.place
                          : reinterpret_cast<const char *>(static_cast<intptr_t>(envelope.place));
  copy(receive->data, from, envelope.bytes, envelope.bytes >= stream_bytes_);
  // A sender that gave up says so before its memory is used for anything else.
  lane.look();
  if (lane.end) return;
  receive->path = "pulled";
  lane.acknowledge(receive);
}

// --- progress ------------------------------------------------------------------------------------

bool Mailbox::progress() {
  try {
    bool moved = greet_guests();
    for (const auto &lane : lanes_) {
      if (!lane || !is_used(*lane)) continue;
      moved |= !lane->end && lane->move();
      if (lane->end) {
        close_lane(*lane);
        moved = true;
      }
    }
    return moved;
  } catch (const std::exception &failure) {
    fail_all(NLC_SYSTEM, failure.what(), roster().rank_text(rank()) + ": " + failure.what());
    return true;
  }
}

bool Mailbox::waits_for_network() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [this](const auto &lane) {
    return lane && !lane->is_local() && is_used(*lane);
  });
}

bool Mailbox::greet_guests() {
  if (!settings_.listener.fd) return false;
  tcp::accept_guests(settings_.listener.fd.get(), guests_);
  bool moved = false;
  for (auto guest = guests_.begin(); guest != guests_.end();) {
    const bool done = guest->listen(party(), [](const tcp::Hello &theirs) {
      return theirs.kind == tcp::kMail;
    });
    if (done && guest->fd) {
      tcp::set_liveness(guest->fd.get());
      Lane &lane = lane_to(guest->hello().member);
      if (failure_ && !lane.closed) {
        lane.end = failure_;
        lane.closed = true;
      }
      lane.adopt(std::move(guest->fd));
      moved = true;
    }
    guest = done ? guests_.erase(guest) : std::next(guest);
  }
  return moved;
}

void Mailbox::watch_guests(std::vector<pollfd> &waits) const {
  if (settings_.listener.fd) waits.push_back({settings_.listener.fd.get(), POLLIN, 0});
  for (const tcp::Guest &guest : guests_) waits.push_back({guest.fd.get(), POLLIN, 0});
}

// A rank that is about to wait for this one would only find that it is gone, and not why.
void Mailbox::tell_latecomers(std::unique_lock<std::mutex> &lock) {
  if (!failure_ || !settings_.listener.fd) return;
  const Clock::time_point until = Clock::now() + kFarewell;
  while (Clock::now() < until) {
    greet_guests();
    std::vector<pollfd> waits;
    watch_guests(waits);
    lock.unlock();
    ::poll(waits.data(), waits.size(), kSleepMs);
    lock.lock();
  }
}

void Mailbox::ring_own() {
  own().bell.add();
  doorbell_.notify(own().listening);
}

void Mailbox::sleep(std::unique_lock<std::mutex> &lock, uint32_t seen, int ms) {
  if (!waits_for_network()) {
    lock.unlock();
    own().bell.sleep(seen, ms);
    return lock.lock();
  }
  std::vector<pollfd> waits{{doorbell_.read_fd(), POLLIN, 0}};
  watch_guests(waits);
  for (const auto &lane : lanes_)
    if (lane && is_used(*lane)) lane->watch(waits);
  // The order matters: the flag is set before the last look at the bell, and others look at the
  // flag after raising the bell.
  own().listening.store(1, std::memory_order_seq_cst);
  if (own().bell.value.load(std::memory_order_seq_cst) == seen) {
    lock.unlock();
    ::poll(waits.data(), waits.size(), ms);
    lock.lock();
  }
  own().listening.store(0, std::memory_order_relaxed);
  char bytes[64];
  while (::read(doorbell_.read_fd(), bytes, sizeof bytes) == sizeof bytes) {
  }
}

// Drive until this transfer has ended; without one, until there is nothing to do or another thread
// wants to drive.
void Mailbox::drive_until(std::unique_lock<std::mutex> &lock, const Transfer *transfer,
                          Clock::time_point until) {
  const std::thread::id before = std::exchange(driver_, std::this_thread::get_id());
  for (bool rested = false;;) {
    deliver(lock);
    if (transfer ? transfer->ended : transfers_.empty() || waiting_ > 0) break;
    const uint32_t seen = own().bell.load();
    const bool moved = progress();
    const Clock::time_point now = Clock::now();
    if (now - last_look_ >= kLook) check_health(now);
    if (moved || !ended_.empty()) {
      rested = false;
      continue;
    }
    if (now >= until) break;
    if (!settings_.own_core) core_spread_.look(sched_getcpu());
    if (rested || !transfer || waits_for_network()) {
      sleep(lock, seen, kSleepMs);
      continue;
    }
    lock.unlock();
    const Counter &bell = own().bell;
    for (int i = 0; i < settings_.spin_budget.spins && bell.load() == seen; ++i) pause_cpu();
    for (int i = 0; i < settings_.spin_budget.yields && bell.load() == seen; ++i) sched_yield();
    lock.lock();
    rested = true;
  }
  driver_ = before;  // another one if a callback of this thread waits for a transfer
  if (waiting_ > 0) changed_.notify_all();
  if (server_sleeps_ && !transfers_.empty()) server_.notify_one();
}

nlc_status Mailbox::drive(const Transfer &transfer, int64_t timeout_ms) {
  const Clock::time_point until =
      timeout_ms > 0 ? after_ms(timeout_ms) : Clock::time_point::max();
  if (::getpid() != pid_)
    throw Failure(NLC_ABORTED, format("this transfer of group '%s' belongs to process %d",
                                      roster().name.c_str(), pid_));
  std::unique_lock<std::mutex> lock(mutex_);
  while (!transfer.ended && Clock::now() < until) {
    if (driver_ == std::thread::id() || driver_ == std::this_thread::get_id()) {
      drive_until(lock, &transfer, until);
      continue;
    }
    ++waiting_;
    ring_own();
    changed_.wait_for(lock, std::chrono::milliseconds(kSleepMs));
    --waiting_;
  }
  return transfer.status;
}

// The mailbox's own thread.
void Mailbox::serve() {
  pthread_setname_np(pthread_self(), "nearlinear mail");
  std::unique_lock<std::mutex> lock(mutex_);
  const auto needed = [this] {
    return !transfers_.empty() && driver_ == std::thread::id() && waiting_ == 0;
  };
  for (int idle = 0; closed_.empty() || !transfers_.empty();) {
    if (idle == kDozes) {
      idle = 0;
      server_sleeps_ = true;
      server_.wait(lock, [&] { return !closed_.empty() || needed(); });
      server_sleeps_ = false;
    }
    lock.unlock();
    std::this_thread::sleep_for(kHeadStart);
    lock.lock();
    ++idle;
    if (!needed()) continue;
    idle = 0;
    drive_until(lock, nullptr, Clock::time_point::max());
  }
  serving_ = false;
  changed_.notify_all();
}

void Mailbox::close(nlc_status status, const std::string &reason, const std::string &to_others) {
  std::unique_lock<std::mutex> lock(mutex_);
  fail_all(status, reason, to_others);
  deliver(lock);
  server_.notify_one();
  ring_own();
  // Not by a callback, which the driver waits for.
  if (driver_ == std::this_thread::get_id()) return;
  ++waiting_;
  changed_.wait(lock, [this] { return driver_ == std::thread::id() && !serving_; });
  --waiting_;
  try {
    tell_latecomers(lock);
  } catch (const std::exception &) {
    // Best effort: they notice the closed port.
  }
}

}  // namespace nlc
