#include "group.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <unordered_map>

#include "copy.h"
#include "reduce.h"
#include "trace.h"

namespace nlc {
namespace {

// Segments of this process by nonce: ranks that are threads share one mapping, as they share
// everything else. (A second mapping would also hide every race from a thread sanitizer.)
std::mutex own_segments_mutex;
std::unordered_map<uint64_t, std::weak_ptr<Mapping>> &own_segments() {
  static auto *segments = new std::unordered_map<uint64_t, std::weak_ptr<Mapping>>();
  return *segments;
}

std::shared_ptr<Mapping> own_segment(uint64_t nonce) {
  const std::lock_guard<std::mutex> lock(own_segments_mutex);
  const auto found = own_segments().find(nonce);
  return found == own_segments().end() ? nullptr : found->second.lock();
}

constexpr int64_t kHeadStart = 300;  // milliseconds

std::atomic<int> most_ranks_here{1};  // of any group so far: what the cores are shared by

}  // namespace

Group::Group(const nlc_options &options, unsigned char *card)
    : name_(options.name ? options.name : "group"),
      timeout_ms_(options.timeout_ms),
      pid_(getpid()) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size)
    throw Failure(NLC_BAD_ARGUMENT, format("rank %d of %d ranks", options.rank, options.size));
  for (int r = 0; r < options.size; ++r)
    global_ranks_.push_back(options.global_ranks ? options.global_ranks[r] : r);
  Arena &arena = Arena::of_this_process();
  describe_this_process(&card_);
  card_.rank = options.rank;
  card_.size = options.size;
  card_.arena_fd = arena.fd();
  card_.arena_bytes = arena.bytes();
  segment_fd_ = make_memory("nearlinear-group", sizeof(Segment));
  card_.segment_fd = segment_fd_.get();
  output_fd_ = make_memory("nearlinear-outputs", arena.bytes());
  card_.output_fd = output_fd_.get();
  own_mapping_ = std::make_shared<Mapping>(map_memory(segment_fd_.get(), sizeof(Segment), true));
  own_ = new (own_mapping_->base()) Segment;
  own_->nonce.store(card_.nonce, std::memory_order_release);
  {
    const std::lock_guard<std::mutex> lock(own_segments_mutex);
    own_segments()[card_.nonce] = own_mapping_;
  }
  if (options.size > 1) {
    const std::string transport = setting("TRANSPORT");
    net_ = make_transport(transport.empty() ? "tcp" : transport);
    doorbell_.hang();
    card_.doorbell_fd = doorbell_.ringing();
    std::strncpy(card_.address, net_->address().c_str(), sizeof card_.address - 1);
  }
  std::memset(card, 0, NLC_CARD_BYTES);
  std::memcpy(card, &card_, sizeof card_);
}

Group::~Group() {
  own_->closed.store(1, std::memory_order_release);
  const std::lock_guard<std::mutex> lock(own_segments_mutex);
  own_segments().erase(card_.nonce);
}

void Group::connect(const unsigned char *cards, int64_t timeout_ms) {
  for (int r = 0; r < card_.size; ++r) {
    const Card &card = read_card(cards + static_cast<size_t>(r) * NLC_CARD_BYTES);
    if (card.rank != r || card.size != card_.size)
      throw Failure(NLC_BAD_ARGUMENT,
                    format("the card of rank %d says rank %d of %d", r, card.rank, card.size));
    cards_.push_back(card);
  }
  place_ = find_topology(cards_, card_.rank);
  deadline_ = after_ms(timeout_ms);
  liveness_ = std::make_unique<Liveness>(cards_, place_.neighbours());

  for (const int rank : place_.neighbours()) {
    const Card &card = cards_[static_cast<size_t>(rank)];
    Neighbour neighbour;
    neighbour.rank = rank;
    neighbour.mapping = card.pid == getpid() ? own_segment(card.nonce) : nullptr;
    if (!neighbour.mapping) {
      try {
        const Fd fd = open_memory_of(card.pid, card.segment_fd);
        neighbour.mapping = std::make_shared<Mapping>(map_memory(fd.get(), sizeof(Segment), true));
        neighbour.pool = Arena::of_this_process().arena_of(card);
      } catch (const Failure &failure) {
        fail_forming(rank, failure);
      }
    }
    neighbour.memory = neighbour.pool ? neighbour.pool->base() : Arena::of_this_process().base();
    neighbour.segment = reinterpret_cast<Segment *>(neighbour.mapping->base());
    if (neighbour.segment->nonce.load(std::memory_order_acquire) != card.nonce)
      fail_forming(rank, Failure(NLC_PEER_DIED, "its memory is gone"));
    neighbours_.push_back(std::move(neighbour));
  }

  const int here = ranks_here();
  int most = most_ranks_here.load();
  while (most < here && !most_ranks_here.compare_exchange_weak(most, here)) {
  }
  most = std::max(most, here);
  patience_ = patience(most, card_.cores);
  chunk_bytes_ = static_cast<size_t>(setting_number("CHUNK_KIB", most <= card_.cores ? 256 : 512))
                 << 10;
  chunk_bytes_ = std::clamp(chunk_bytes_, size_t{4096}, kSlotBytes);
  stream_bytes_ = stream_threshold(here);
  slots = SlotWriter(most <= card_.cores);
  int cores = card_.cores;
  for (const int rank : place_.neighbours())
    cores = std::min<int>(cores, cards_[static_cast<size_t>(rank)].cores);
  own_->slots_in_use = here <= cores ? kSlots : kFewSlots;

  if (place_.node_count() == 1) {
    net_.reset();
    doorbell_ = Doorbell();
  } else if (place_.leads()) {
    std::vector<std::string> addresses;
    for (const auto &ranks : place_.nodes)
      addresses.push_back(cards_[static_cast<size_t>(ranks[0])].address);
    uint64_t cookie = 0;
    for (const Card &card : cards_) cookie = cookie * 0x100000001b3ULL ^ card.nonce;
    try {
      net_->connect(addresses, place_.node, cookie, timeout_ms);
    } catch (const LinkFailure &failure) {
      const int rank = place_.nodes[static_cast<size_t>(failure.node)][0];
      fail(NLC_PEER_DIED, rank_text(rank) + ": " + failure.what());
    } catch (const std::runtime_error &failure) {
      fail(NLC_TIMEOUT, std::string("the nodes could not be connected: ") + failure.what());
    }
    net_->wake_on(doorbell_.hearing());
  } else {
    net_.reset();
    const int leader = place_.neighbours()[0];
    const Card &card = cards_[static_cast<size_t>(leader)];
    try {
      doorbell_.find(card.pid, card.doorbell_fd);
    } catch (const Failure &failure) {
      fail_forming(leader, failure);
    }
  }
  raise(own_->ready, 1);  // everything of mine is there, and I have everything of theirs
  for (int i = 0; i < here; ++i) await_counter(neighbour(i).segment->ready, 1, i);
}

// --- ring steps --------------------------------------------------------------------------------

void Group::post(RingName ring, uint32_t step) { raise(own_->rings[ring].posted, step + 1); }

void Group::consume(RingName ring, uint32_t step) { raise(own_->rings[ring].consumed, step + 1); }

void Group::await_post(RingName ring, uint32_t step, int local) {
  await_counter(neighbour(local).segment->rings[ring].posted, step + 1, local);
}

void Group::await_free(RingName ring, uint32_t step) {
  for (int i = 0; i < ranks_here(); ++i)
    if (i != place_.local)
      await_counter(neighbour(i).segment->rings[ring].consumed, step + 1 - ring_slots(), i);
}

void Group::await_all(RingName ring, uint32_t step) {
  for (int i = 0; i < ranks_here(); ++i)
    if (i != place_.local) await_counter(neighbour(i).segment->rings[ring].consumed, step + 1, i);
}

void Group::await_consumed_by(int local, RingName ring, uint32_t step) {
  await_counter(neighbour(local).segment->rings[ring].consumed, step + 1, local);
}

// --- waiting -----------------------------------------------------------------------------------

void Group::raise(Counter &counter, uint32_t to) {
  counter.raise(to);
  if (!net_) doorbell_.ring(leader().listening);
}

void Group::await_counter(Counter &counter, uint32_t target, int local) {
  if (counter.reached(target)) return;
  // Spinning on the core that the awaited rank needs only keeps it from arriving.
  const int core = sched_getcpu();
  own_->core.store(core, std::memory_order_relaxed);
  const bool shared = neighbour(local).segment->core.load(std::memory_order_relaxed) == core;
  spread_over_cores(core);
  for (int i = shared ? patience_.spins : 0; i < patience_.spins; ++i) {
    pause_cpu();
    if (counter.reached(target)) return;
    if (net_ && (i & 63) == 63) poll_net(0);
  }
  for (int i = 0; i < patience_.yields; ++i) {
    sched_yield();
    if (counter.reached(target)) return;
  }
  for (;;) {
    const uint32_t seen = counter.load();
    if (static_cast<int32_t>(seen - target) >= 0) return;
    if (net_) {
      // The order matters: the flag is up before the counter is looked at for the last time, and
      // neighbours look at the flag after they have raised the counter.
      own_->listening.store(1, std::memory_order_seq_cst);
      if (counter.value.load(std::memory_order_seq_cst) == seen) poll_net(2000);
      own_->listening.store(0, std::memory_order_relaxed);
    } else {
      counter.sleep(seen, 20);
    }
    if (counter.reached(target)) return;
    look_around(neighbour(local).rank);
  }
}

void Group::await(const Request &request) {
  int idle = 0;
  while (!request.done) {
    const bool moved = poll_net(idle < 4 ? 0 : 2000);
    idle = moved ? 0 : idle + 1;
    if (!moved) look_around(-1);
  }
}

bool Group::poll_net(int timeout_us) {
  try {
    return net_->poll(timeout_us);
  } catch (const LinkFailure &failure) {
    const int rank = place_.nodes[static_cast<size_t>(failure.node)][0];
    fail(NLC_PEER_DIED, format("%s: %s", rank_text(rank).c_str(), failure.what()));
  }
}

// --- construction of one call ------------------------------------------------------------------

CallCard Group::describe_call(const nlc_call &call) const {
  CallCard card{};
  card.sequence = sequence_;
  card.count = call.count;
  card.scale = call.scale;
  card.kind = call.kind;
  card.dtype = call.dtype;
  card.reduce = call.reduce;
  card.root = call.root;
  card.input = card.shared = -1;
  return card;
}

bool Group::forked() const { return getpid() != pid_; }

void Group::check(const nlc_call &call) const {
  if (call.kind < NLC_ALL_GATHER || call.kind > NLC_BARRIER)
    throw Failure(NLC_BAD_ARGUMENT, format("unknown operation %d", call.kind));
  if (call.dtype < 0 || call.dtype >= NLC_DTYPES)
    throw Failure(NLC_BAD_ARGUMENT, format("unknown dtype %d", call.dtype));
  const bool reduces = call.kind == NLC_REDUCE_SCATTER || call.kind == NLC_ALL_REDUCE;
  if (reduces && !can_reduce(call.dtype, call.reduce))
    throw Failure(NLC_BAD_ARGUMENT, format("cannot reduce %s by %s", dtype_name(call.dtype),
                                           reduce_name(call.reduce)));
  if (call.kind == NLC_BROADCAST && (call.root < 0 || call.root >= size()))
    throw Failure(NLC_BAD_ARGUMENT, format("root %d of %d ranks", call.root, size()));
}

void Group::run(const nlc_call &call) {
  check(call);
  if (forked())
    throw Failure(NLC_ABORTED, format("group '%s' belongs to process %d and cannot be used after a "
                                      "fork: make a new group in the child",
                                      name_.c_str(), pid_));
  if (aborted_.load()) fail(NLC_ABORTED, abort_reason_);
  if (broken_status_ != NLC_OK)
    throw Failure(NLC_ABORTED, format("group '%s' failed before and cannot be used any more: %s",
                                      name_.c_str(), broken_.c_str()));
  const int64_t timeout = call.timeout_ms == NLC_ANY_TIMEOUT ? timeout_ms_ : call.timeout_ms;
  // Leaders see the other nodes, so they shall be the first to say who is late.
  const bool led = place_.node_count() > 1 && !place_.leads();
  deadline_ = after_ms(timeout + (led ? kHeadStart : 0));
  call_timeout_ms_ = timeout;
  if (told_ >= 0) tell_nodes(-1);  // that was another call
  ++sequence_;
  current_ = describe_call(call);
  path = "alone";
  own_->calls[sequence_ % kCalls] = current_;
  own_->core.store(sched_getcpu(), std::memory_order_relaxed);
  own_->entered.store(sequence_, std::memory_order_release);
  if (outputs_ && call.kind != NLC_ALL_GATHER) outputs_->number_of(call.output, 0);
  Trace trace(name_, current_);
  try {
    switch (call.kind) {
      case NLC_ALL_GATHER: all_gather(*this, call); break;
      case NLC_REDUCE_SCATTER: reduce_scatter(*this, call); break;
      case NLC_ALL_REDUCE: all_reduce(*this, call); break;
      case NLC_BROADCAST: broadcast(*this, call); break;
      default: barrier(*this);
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

const CallCard &Group::call_of(int local) {
  return neighbour(local).segment->calls[sequence_ % kCalls];
}

void Group::compare_call(int local) {
  if (local != place_.local) compare_with(call_of(local), neighbour(local).rank);
}

void Group::compare_with(const CallCard &theirs, int rank) {
  const CallCard &mine = current_;
  if (theirs.sequence == mine.sequence && theirs.kind == mine.kind && theirs.count == mine.count &&
      theirs.dtype == mine.dtype && theirs.reduce == mine.reduce && theirs.root == mine.root &&
      theirs.scale == mine.scale)
    return;
  fail(NLC_MISMATCH,
       format("ranks called different operations: rank %lld called %s, rank %lld called %s",
              static_cast<long long>(global_ranks_[static_cast<size_t>(this->rank())]),
              call_text(mine).c_str(),
              static_cast<long long>(global_ranks_[static_cast<size_t>(rank)]),
              call_text(theirs).c_str()));
}

std::string Group::describe() const {
  std::string nodes;
  for (const auto &ranks : place_.nodes) {
    nodes += nodes.empty() ? "[" : ", [";
    for (size_t i = 0; i < ranks.size(); ++i) nodes += format(i ? ", %d" : "%d", ranks[i]);
    nodes += "]";
  }
  return format(
      "{\"name\": %s, \"rank\": %d, \"size\": %d, \"nodes\": [%s], \"cores\": %d, "
      "\"chunk_bytes\": %zu, \"stream_bytes\": %zu, \"network\": %s}",
      json_text(name_).c_str(), rank(), size(), nodes.c_str(), card_.cores, chunk_bytes_,
      stream_bytes_, json_text(net_ ? net_->describe() : "").c_str());
}

}  // namespace nlc
