#include "group.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "copy.h"
#include "mailbox.h"
#include "reduce.h"
#include "trace.h"

namespace nlc {
namespace {

MappingsHere &own_segments() {
  static auto *segments = new MappingsHere();
  return *segments;
}

constexpr int64_t kHeadStart = 300;  // milliseconds

// Largest number of ranks on this node in any group so far, which share its cores.
std::atomic<int> most_ranks_here{1};

}  // namespace

Group::Group(const nlc_options &options, unsigned char *peer_info)
    : timeout_ms_(options.timeout_ms),
      pid_(getpid()) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size)
    throw Failure(NLC_BAD_ARGUMENT, format("rank %d of %d ranks", options.rank, options.size));
  roster_.name = options.name ? options.name : "group";
  for (int r = 0; r < options.size; ++r)
    roster_.global_ranks.push_back(options.global_ranks ? options.global_ranks[r] : r);
  Arena &arena = Arena::of_this_process();
  describe_this_process(&own_info_);
  own_info_.rank = options.rank;
  own_info_.size = options.size;
  own_info_.arena_fd = arena.fd();
  own_info_.arena_bytes = arena.bytes();
  segment_fd_ = make_memory("nearlinear-group", sizeof(Segment));
  own_info_.segment_fd = segment_fd_.get();
  output_fd_ = make_memory("nearlinear-outputs", arena.bytes());
  own_info_.output_fd = output_fd_.get();
  own_mapping_ = std::make_shared<Mapping>(map_memory(segment_fd_.get(), sizeof(Segment), true));
  own_ = new (own_mapping_->base()) Segment;
  own_->nonce.store(own_info_.nonce, std::memory_order_release);
  own_segments().get(own_info_.nonce, [this] { return own_mapping_; });
  if (options.size > 1) {
    const std::string transport = setting("TRANSPORT");
    net_ = make_transport(transport.empty() ? "tcp" : transport);
    doorbell_.create();
    own_info_.doorbell_fd = doorbell_.write_fd();
    std::strncpy(own_info_.address, net_->address().c_str(), sizeof own_info_.address - 1);
    open_mail();
  }
  std::memset(peer_info, 0, NLC_PEER_INFO_BYTES);
  std::memcpy(peer_info, &own_info_, sizeof own_info_);
}

Group::~Group() {
  leave();
  own_segments().forget(own_info_.nonce);
}

void Group::connect(const unsigned char *peer_infos, int64_t timeout_ms) {
  for (int r = 0; r < own_info_.size; ++r) {
    const PeerInfo &peer =
        read_peer_info(peer_infos + static_cast<size_t>(r) * NLC_PEER_INFO_BYTES);
    if (peer.rank != r || peer.size != own_info_.size)
      throw Failure(NLC_BAD_ARGUMENT,
                    format("the peer info of rank %d says rank %d of %d", r, peer.rank, peer.size));
    roster_.peers.push_back(peer);
  }
  roster_.topology = find_topology(roster_.peers, own_info_.rank);
  deadline_ = after_ms(timeout_ms);
  liveness_ = std::make_shared<Liveness>(roster_.peers, roster_.topology.neighbours());

  for (const int rank : roster_.topology.neighbours()) {
    const PeerInfo &peer = roster_.peer(rank);
    Neighbour neighbour;
    neighbour.rank = rank;
    neighbour.mapping = peer.pid == getpid() ? own_segments().find(peer.nonce) : nullptr;
    if (!neighbour.mapping) {
      try {
        const Fd fd = open_memory_of(peer.pid, peer.segment_fd);
        neighbour.mapping = std::make_shared<Mapping>(map_memory(fd.get(), sizeof(Segment), true));
        neighbour.pool = Arena::of_this_process().arena_of(peer);
      } catch (const Failure &failure) {
        fail_forming(rank, failure);
      }
    }
    neighbour.memory = neighbour.pool ? neighbour.pool->base() : Arena::of_this_process().base();
    neighbour.segment = reinterpret_cast<Segment *>(neighbour.mapping->base());
    if (neighbour.segment->nonce.load(std::memory_order_acquire) != peer.nonce)
      fail_forming(rank, Failure(NLC_PEER_DIED, "its memory is gone"));
    neighbours_.push_back(std::move(neighbour));
  }
  std::vector<Segment *> segments;
  for (const Neighbour &neighbour : neighbours_) segments.push_back(neighbour.segment);
  core_spread_ = CoreSpread(std::move(segments), roster_.topology.local, own_info_.cores);

  const int here = ranks_here();
  int most = most_ranks_here.load();
  while (most < here && !most_ranks_here.compare_exchange_weak(most, here)) {
  }
  most = std::max(most, here);
  spin_budget_ = spin_budget(most, own_info_.cores);
  const int64_t default_kib = most <= own_info_.cores ? 256 : 512;
  chunk_bytes_ = static_cast<size_t>(setting_number("CHUNK_KIB", default_kib)) << 10;
  chunk_bytes_ = std::clamp(chunk_bytes_, size_t{4096}, kSlotBytes);
  stream_bytes_ = stream_threshold(here);
  slots = SlotWriter(most <= own_info_.cores);
  int cores = own_info_.cores;
  for (const int rank : roster_.topology.neighbours())
    cores = std::min<int>(cores, roster_.peer(rank).cores);
  own_->slots_in_use = here <= cores ? kSlots : kFewSlots;
  own_->chunk_bytes = chunk_bytes_;

  if (roster_.topology.node_count() == 1) {
    net_.reset();
    mail_listener_ = {};
    doorbell_ = Doorbell();
  } else if (roster_.topology.leads()) {
    std::vector<std::string> addresses;
    for (const auto &ranks : roster_.topology.nodes)
      addresses.push_back(roster_.peer(ranks[0]).address);
    try {
      net_->connect(addresses, roster_.topology.node, key(), timeout_ms);
    } catch (const LinkFailure &failure) {
      const int rank = roster_.topology.nodes[static_cast<size_t>(failure.node)][0];
      fail(NLC_PEER_DIED, roster_.rank_text(rank) + ": " + failure.what());
    } catch (const std::runtime_error &failure) {
      fail(NLC_TIMEOUT, std::string("the nodes could not be connected: ") + failure.what());
    }
    net_->wake_on(doorbell_.read_fd());
  } else {
    net_.reset();
    const int leader = roster_.topology.neighbours()[0];
    const PeerInfo &peer = roster_.peer(leader);
    try {
      doorbell_.open(peer.pid, peer.doorbell_fd);
    } catch (const Failure &failure) {
      fail_forming(leader, failure);
    }
  }
  if (mail_fd_ && ::ftruncate(mail_fd_.get(), static_cast<off_t>(Mail::bytes(here))) != 0)
    throw system_failure("cannot size the shared memory of messages");
  remember_members(roster_.name, roster_.global_ranks, rank());
  raise(own_->ready, 1);  // this rank is set up, and has mapped everything of the others
  for (int i = 0; i < here; ++i) {
    await_counter(neighbour(i).segment->ready, 1, i);
    // Ranks with other groups before this one may have chosen differently.
    chunk_bytes_ = std::min<size_t>(chunk_bytes_, neighbour(i).segment->chunk_bytes);
  }
}

Key Group::key() const {
  std::string nonces;
  for (const PeerInfo &peer : roster_.peers)
    nonces.append(reinterpret_cast<const char *>(&peer.nonce), sizeof peer.nonce);
  return hmac_sha256(setting("SECRET"), nonces);
}

// --- ring steps --------------------------------------------------------------------------------

void Group::post(RingName ring, uint32_t step) { raise(own_->rings[ring].posted, step + 1); }

void Group::consume(RingName ring, uint32_t step) { raise(own_->rings[ring].consumed, step + 1); }

void Group::await_post(RingName ring, uint32_t step, int local) {
  await_counter(neighbour(local).segment->rings[ring].posted, step + 1, local);
}

void Group::await_free(RingName ring, uint32_t step) {
  for (int i = 0; i < ranks_here(); ++i)
    if (i != roster_.topology.local)
      await_counter(neighbour(i).segment->rings[ring].consumed, step + 1 - ring_slots(), i);
}

void Group::await_all(RingName ring, uint32_t step) {
  for (int i = 0; i < ranks_here(); ++i)
    if (i != roster_.topology.local)
      await_counter(neighbour(i).segment->rings[ring].consumed, step + 1, i);
}

void Group::await_consumed_by(int local, RingName ring, uint32_t step) {
  await_counter(neighbour(local).segment->rings[ring].consumed, step + 1, local);
}

// --- waiting -----------------------------------------------------------------------------------

void Group::raise(Counter &counter, uint32_t to) {
  counter.raise(to);
  if (!net_) doorbell_.notify(leader().listening);
}

void Group::await_counter(Counter &counter, uint32_t target, int local) {
  if (counter.reached(target)) return;
  // Spinning on the core that the awaited rank needs would only delay it.
  const int core = sched_getcpu();
  core_spread_.look(core);
  const bool shared = neighbour(local).segment->core.load(std::memory_order_relaxed) == core;
  for (int i = shared ? spin_budget_.spins : 0; i < spin_budget_.spins; ++i) {
    pause_cpu();
    if (counter.reached(target)) return;
    if (net_ && (i & 63) == 63) poll_net(0);
  }
  for (int i = 0; i < spin_budget_.yields; ++i) {
    sched_yield();
    if (counter.reached(target)) return;
  }
  for (;;) {
    const uint32_t seen = counter.load();
    if (static_cast<int32_t>(seen - target) >= 0) return;
    if (net_) {
      // The order matters: the flag is set before the last look at the counter, and neighbours look
      // at the flag after raising the counter.
      own_->listening.store(1, std::memory_order_seq_cst);
      if (counter.value.load(std::memory_order_seq_cst) == seen) poll_net(2000);
      own_->listening.store(0, std::memory_order_relaxed);
    } else {
      counter.sleep(seen, 20);
    }
    if (counter.reached(target)) return;
    check_peers(neighbour(local).rank);
  }
}

void Group::await(const Request &request) {
  int idle = 0;
  while (!request.done) {
    const bool moved = poll_net(idle < 4 ? 0 : 2000);
    idle = moved ? 0 : idle + 1;
    if (!moved) check_peers(-1);
  }
}

bool Group::poll_net(int timeout_us) {
  try {
    return net_->poll(timeout_us);
  } catch (const LinkFailure &failure) {
    const int rank = roster_.topology.nodes[static_cast<size_t>(failure.node)][0];
    fail(NLC_PEER_DIED, format("%s: %s", roster_.rank_text(rank).c_str(), failure.what()));
  }
}

// --- construction of one call ------------------------------------------------------------------

CallSignature Group::describe_call(const nlc_call &call) const {
  CallSignature signature{};
  signature.sequence = sequence_;
  signature.count = call.count;
  signature.scale = call.scale;
  signature.kind = call.kind;
  signature.dtype = call.dtype;
  signature.reduce = call.reduce;
  signature.root = call.root;
  signature.input = signature.shared = -1;
  return signature;
}

bool Group::forked() const { return getpid() != pid_; }

void Group::check(const nlc_call &call) const {
  if (call.kind < NLC_ALL_GATHER || call.kind > NLC_RECEIVE)
    throw Failure(NLC_BAD_ARGUMENT, format("unknown operation %d", call.kind));
  if (call.dtype < 0 || call.dtype >= NLC_DTYPES)
    throw Failure(NLC_BAD_ARGUMENT, format("unknown dtype %d", call.dtype));
  if (reduces(call.kind) && !can_reduce(call.dtype, call.reduce))
    throw Failure(NLC_BAD_ARGUMENT, format("cannot reduce %s by %s", dtype_name(call.dtype),
                                           reduce_name(call.reduce)));
  if (is_message(call.kind)) {
    const bool any = call.kind == NLC_RECEIVE && call.root == kAnyRank;
    if (!any && (call.root < 0 || call.root >= size() || call.root == rank()))
      throw Failure(NLC_BAD_ARGUMENT,
                    format("%s: rank %d %s rank %d of %d ranks", kind_name(call.kind), rank(),
                           call.kind == NLC_SEND ? "to" : "from", call.root, size()));
    if (call.tag < 0)
      throw Failure(NLC_BAD_ARGUMENT, format("%s: a negative tag, %lld", kind_name(call.kind),
                                             static_cast<long long>(call.tag)));
  }
  if (has_root(call.kind) && (call.root < 0 || call.root >= size()))
    throw Failure(NLC_BAD_ARGUMENT, format("root %d of %d ranks", call.root, size()));
  if (exchanges(call.kind) &&
      (!call.sends || !call.receives != (call.kind == NLC_REDUCE_SCATTER_UNEVEN)))
    throw Failure(NLC_BAD_ARGUMENT, format("%s without its parts", kind_name(call.kind)));
  if (call.receives && call.sends[rank()].count != call.receives[rank()].count)
    throw Failure(NLC_BAD_ARGUMENT,
                  format("%s: this rank sends itself %llu elements and expects %llu",
                         kind_name(call.kind),
                         static_cast<unsigned long long>(call.sends[rank()].count),
                         static_cast<unsigned long long>(call.receives[rank()].count)));
}

void Group::check_usable() const {
  if (forked())
    throw Failure(NLC_ABORTED, format("group '%s' belongs to process %d and cannot be used after a "
                                      "fork: make a new group in the child",
                                      roster_.name.c_str(), pid_));
}

void Group::run(const nlc_call &call) {
  check(call);
  if (is_message(call.kind))
    throw Failure(NLC_BAD_ARGUMENT, format("%s must be posted", kind_name(call.kind)));
  check_usable();
  if (aborted_.load()) fail(NLC_ABORTED, abort_reason_);
  if (failure_status_ != NLC_OK)
    throw Failure(NLC_ABORTED, format("group '%s' failed before and cannot be used any more: %s",
                                      roster_.name.c_str(), failure_text_.c_str()));
  const int64_t timeout = timeout_of(call);
  // Leaders see the other nodes, so they report a late rank first.
  const bool led = roster_.topology.node_count() > 1 && !roster_.topology.leads();
  deadline_ = after_ms(timeout + (led ? kHeadStart : 0));
  call_timeout_ms_ = timeout;
  if (reported_ >= 0) tell_nodes(-1);  // left over from another call
  ++sequence_;
  current_ = describe_call(call);
  path = "alone";
  own_->calls[sequence_ % kCalls] = current_;
  own_->core.store(sched_getcpu(), std::memory_order_relaxed);
  own_->entered.store(sequence_, std::memory_order_release);
  if (outputs_ && call.kind != NLC_ALL_GATHER) outputs_->number_of(call.output, 0);
  for (int r = 0; outputs_ && call.receives && r < size(); ++r)
    outputs_->number_of(call.receives[r].data, 0);
  Trace trace(roster_.name, current_);
  try {
    switch (call.kind) {
      case NLC_ALL_GATHER: all_gather(*this, call); break;
      case NLC_REDUCE_SCATTER: reduce_scatter(*this, call); break;
      case NLC_ALL_REDUCE: all_reduce(*this, call); break;
      case NLC_BROADCAST: broadcast(*this, call); break;
      case NLC_BARRIER: barrier(*this); break;
      case NLC_REDUCE: reduce_to_root(*this, call); break;
      case NLC_REDUCE_SCATTER_UNEVEN: reduce_scatter_uneven(*this, call); break;
      default: exchange(*this, call);
    }
  } catch (const Failure &failure) {
    trace.failed(failure.what());
    throw;
  }
  trace.done(path);
  own_->finished.store(sequence_, std::memory_order_release);
}

void Group::publish_input(const void *input, size_t bytes) {
  own_->calls[sequence_ % kCalls].input = Arena::of_this_process().offset_of(input, bytes);
}

void Group::publish_shared(int number) { own_->calls[sequence_ % kCalls].shared = number; }

const CallSignature &Group::call_of(int local) {
  return neighbour(local).segment->calls[sequence_ % kCalls];
}

void Group::compare_call(int local) {
  if (local != roster_.topology.local) compare_with(call_of(local), neighbour(local).rank);
}

void Group::compare_with(const CallSignature &theirs, int rank) {
  const CallSignature &mine = current_;
  if (theirs.sequence == mine.sequence && theirs.kind == mine.kind &&
      (theirs.count == mine.count || mine.kind == NLC_ALL_TO_ALL) && theirs.dtype == mine.dtype &&
      theirs.reduce == mine.reduce && theirs.root == mine.root && theirs.scale == mine.scale)
    return;
  fail_mismatch(
      format("ranks called different operations: rank %lld called %s, rank %lld called %s",
             roster_.global(this->rank()), call_text(mine).c_str(), roster_.global(rank),
             call_text(theirs).c_str()));
}

void Group::compare_sizes(int sender, uint64_t sent, uint64_t expected, int receiver) {
  if (sent == expected) return;
  const auto global = [this](int rank) {
    return roster_.global(rank);
  };
  const size_t element = element_bytes(current_.dtype);
  fail_mismatch(format("rank %lld sends %llu elements to rank %lld, which expects %llu",
                       global(sender), static_cast<unsigned long long>(sent / element),
                       global(receiver < 0 ? rank() : receiver),
                       static_cast<unsigned long long>(expected / element)));
}

std::string Group::describe() const {
  std::string nodes;
  for (const auto &ranks : roster_.topology.nodes) {
    nodes += nodes.empty() ? "[" : ", [";
    for (size_t i = 0; i < ranks.size(); ++i) nodes += format(i ? ", %d" : "%d", ranks[i]);
    nodes += "]";
  }
  return format(
      "{\"name\": %s, \"rank\": %d, \"size\": %d, \"nodes\": [%s], \"cores\": %d, "
      "\"chunk_bytes\": %zu, \"stream_bytes\": %zu, \"network\": %s}",
      json_text(roster_.name).c_str(), rank(), size(), nodes.c_str(), own_info_.cores, chunk_bytes_,
      stream_bytes_, json_text(net_ ? net_->describe() : "").c_str());
}

}  // namespace nlc
