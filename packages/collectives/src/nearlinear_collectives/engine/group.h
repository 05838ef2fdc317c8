// A group of ranks on one or more nodes, and the primitives of every collective: steps through
// rings of shared memory, waits that detect dead and stuck ranks, and links between nodes.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "arena.h"
#include "core_spread.h"
#include "doorbell.h"
#include "liveness.h"
#include "memory.h"
#include "roster.h"
#include "segment.h"
#include "shared_output.h"
#include "slot_writer.h"
#include "tcp_socket.h"
#include "transport.h"

namespace nlc {

class Mailbox;
struct LaneEnd;

struct Neighbour {
  int rank = 0;
  Segment *segment = nullptr;
  std::shared_ptr<Mapping> mapping;  // of the segment
  std::shared_ptr<Mapping> pool;     // nullptr if it is this process
  const char *memory = nullptr;      // start of that pool, read-only
};

class Group {
 public:
  Group(const nlc_options &options, unsigned char *peer_info);
  ~Group();
  void connect(const unsigned char *peer_infos, int64_t timeout_ms);
  void run(const nlc_call &call);  // runs one collective on this thread; throws Failure
  void abort(const char *reason);
  void check(const nlc_call &call) const;  // throws NLC_BAD_ARGUMENT
  // Messages between two ranks. Throws Failure if the group cannot be used.
  std::shared_ptr<Mailbox> mailbox();
  int64_t timeout_of(const nlc_call &call) const {
    return call.timeout_ms == NLC_ANY_TIMEOUT ? timeout_ms_ : call.timeout_ms;
  }
  std::string describe() const;
  // Allocate memory for an all_gather of `bytes` per rank that the ranks of the node share. Returns
  // nullptr on several nodes, for small gathers, or if ranks do not agree.
  void *allocate_shared(size_t bytes);
  bool forked() const;  // true in a forked child of the creating process

  // --- for the collectives -------------------------------------------------------------------
  const Topology &topology() const { return roster_.topology; }
  int rank() const { return roster_.topology.rank; }
  int size() const { return roster_.topology.size; }
  int ranks_here() const { return roster_.topology.ranks_here(); }
  Neighbour &neighbour(int local) { return neighbours_[static_cast<size_t>(local)]; }
  Segment &mine() { return *own_; }
  Segment &leader() { return *neighbours_[0].segment; }
  Transport &net() { return *net_; }

  // Ring steps. Step numbers are identical on all ranks of the node.
  uint32_t take_steps(RingName ring, uint32_t steps) {
    const uint32_t first = steps_[ring];
    steps_[ring] += steps;
    return first;
  }
  uint32_t ring_slots() const { return own_->slots_in_use; }
  void await_free(RingName ring, uint32_t step);  // wait until this rank's slot may be filled
  void post(RingName ring, uint32_t step);                   // publish this rank's filled slot
  // Wait until a neighbour has filled its slot.
  void await_post(RingName ring, uint32_t step, int local);
  // Report that this rank has read its neighbours' slots.
  void consume(RingName ring, uint32_t step);
  void await_all(RingName ring, uint32_t step);  // wait until all neighbours have consumed a step
  void await_consumed_by(int local, RingName ring, uint32_t step);

  // Compare a neighbour's call with this rank's; throw NLC_MISMATCH with both on a difference.
  void compare_call(int local);
  void compare_with(const CallSignature &theirs, int rank);
  // Throw NLC_MISMATCH if a rank sends other than the expected bytes to a rank, this one if -1.
  void compare_sizes(int sender, uint64_t sent, uint64_t expected, int receiver = -1);
  const CallSignature &call_of(int local);
  const CallSignature &current() const { return current_; }

  // Publish the offset of this call's input if it is in the pool. Call before post().
  void publish_input(const void *input, size_t bytes);
  void publish_shared(int number);
  SharedOutputs *outputs() { return outputs_.get(); }  // nullptr before the first allocation

  // Wait for a network request while making progress on all links. Leader only.
  void await(const Request &request);

  // Chunk sizes of this group, in bytes.
  size_t chunk_bytes() const { return chunk_bytes_; }
  size_t node_chunk_bytes() const { return node_chunk_bytes_; }  // of a node's block on the network
  size_t stream_bytes() const { return stream_bytes_; }

  void set_timeout(int64_t ms) { timeout_ms_ = ms; }
  const std::string &name() const { return roster_.name; }
  SlotWriter slots;
  const char *path = "";  // data path of the current call, for the trace

  // --- for the threads of the engine -----------------------------------------------------------
  std::mutex turn;  // held while a collective runs

 private:
  void raise(Counter &counter, uint32_t to);
  void await_counter(Counter &counter, uint32_t target, int local);
  bool poll_net(int timeout_us);
  void check_peers(int awaited);  // slow path of every wait; throws if waiting is futile
  [[noreturn]] void fail(nlc_status status, const std::string &reason);
  [[noreturn]] void fail_with(nlc_status status, const std::string &text);
  [[noreturn]] void fail_mismatch(const std::string &difference);
  void fail_if_any_died();
  std::optional<LaneEnd> death_in_messages();
  [[noreturn]] void time_out(int awaited);
  [[noreturn]] void fail_forming(int rank, const Failure &failure);
  void tell_nodes(int awaited);
  int slowest_neighbour();
  bool all_released(int number, uint32_t times);
  std::string call_text(const CallSignature &call) const;
  CallSignature describe_call(const nlc_call &call) const;
  void check_usable() const;
  Key key() const;  // proves membership in this group
  void open_mail();
  void close_mail(nlc_status status, const std::string &reason, const std::string &to_others);
  void leave();
  void publish_failure(nlc_status status, const std::string &text);

  Roster roster_;
  int64_t timeout_ms_;
  PeerInfo own_info_{};
  Fd segment_fd_;
  std::shared_ptr<Mapping> own_mapping_;
  Segment *own_ = nullptr;
  std::vector<Neighbour> neighbours_;
  std::shared_ptr<Liveness> liveness_;
  std::unique_ptr<Transport> net_;
  Fd output_fd_;
  std::shared_ptr<SharedOutputs> outputs_;
  std::mutex outputs_mutex_;
  Fd mail_fd_;
  tcp::Interface mail_interface_;
  tcp::Listener mail_listener_;
  std::mutex mailbox_mutex_;
  std::shared_ptr<Mailbox> mailbox_;  // created by the first message
  Doorbell doorbell_;
  SpinBudget spin_budget_{2000, 20};
  CoreSpread core_spread_;
  size_t chunk_bytes_ = 256 << 10;
  size_t node_chunk_bytes_ = 128 << 10;
  size_t stream_bytes_ = 16 << 20;
  uint32_t steps_[kRings] = {0, 0, 0};
  uint64_t sequence_ = 0;
  CallSignature current_{};
  int64_t call_timeout_ms_ = 0;
  Clock::time_point deadline_;
  Clock::time_point last_look_;
  int reported_ = -1;       // node that this leader last reported to wait for
  std::string failure_text_;  // reason why the group cannot be used any more
  nlc_status failure_status_ = NLC_OK;
  std::atomic<bool> aborted_{false};
  std::string abort_reason_;
  int pid_ = 0;
};

// The collectives, each in its own file. All ranks of the group must call the same one.
void all_gather(Group &group, const nlc_call &call);
void reduce_scatter(Group &group, const nlc_call &call);
void all_reduce(Group &group, const nlc_call &call);
void broadcast(Group &group, const nlc_call &call);
void barrier(Group &group);
void exchange(Group &group, const nlc_call &call);
void reduce_scatter_uneven(Group &group, const nlc_call &call);
void reduce_to_root(Group &group, const nlc_call &call);

}  // namespace nlc
