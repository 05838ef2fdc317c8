// A group of ranks on one or more nodes, and what every collective is built from: steps through
// rings of shared memory, waits that notice a dead or stuck rank, and the links between nodes.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arena.h"
#include "card.h"
#include "doorbell.h"
#include "liveness.h"
#include "memory.h"
#include "segment.h"
#include "shared_output.h"
#include "slot_writer.h"
#include "topology.h"
#include "transport.h"

namespace nlc {

struct Neighbour {
  int rank = 0;
  Segment *segment = nullptr;
  std::shared_ptr<Mapping> mapping;  // of the segment
  std::shared_ptr<Mapping> pool;     // of its process; nullptr if that is this one
  const char *memory = nullptr;      // where that pool begins, for reading
};

class Group {
 public:
  Group(const nlc_options &options, unsigned char *card);
  ~Group();
  void connect(const unsigned char *cards, int64_t timeout_ms);
  void run(const nlc_call &call);  // one collective, on this thread; throws Failure
  void abort(const char *reason);
  void check(const nlc_call &call) const;  // throws NLC_BAD_ARGUMENT
  std::string describe() const;
  // Memory for an all_gather of `bytes` per rank that is shared by the ranks of the node, or
  // nullptr: on several nodes, for small gathers, or when ranks do not agree.
  void *allocate_shared(size_t bytes);
  bool forked() const;  // this process is a child of the one that made the group

  // --- for the collectives -------------------------------------------------------------------
  const Topology &place() const { return place_; }
  int rank() const { return place_.rank; }
  int size() const { return place_.size; }
  int ranks_here() const { return place_.ranks_here(); }
  Neighbour &neighbour(int local) { return neighbours_[static_cast<size_t>(local)]; }
  Segment &mine() { return *own_; }
  Segment &leader() { return *neighbours_[0].segment; }
  Transport &net() { return *net_; }

  // Ring steps. A step's number is the same on all ranks of the node.
  uint32_t take_steps(RingName ring, uint32_t steps) {
    const uint32_t first = steps_[ring];
    steps_[ring] += steps;
    return first;
  }
  uint32_t ring_slots() const { return own_->slots_in_use; }
  void await_free(RingName ring, uint32_t step);             // my slot may be filled
  void post(RingName ring, uint32_t step);                   // my slot is filled
  void await_post(RingName ring, uint32_t step, int local);  // a neighbour's slot is filled
  void consume(RingName ring, uint32_t step);                // I have read my neighbours' slots
  void await_all(RingName ring, uint32_t step);              // all neighbours have consumed a step
  void await_consumed_by(int local, RingName ring, uint32_t step);

  // Compares a neighbour's call with mine; throws NLC_MISMATCH naming both.
  void compare_call(int local);
  void compare_with(const CallCard &theirs, int rank);
  const CallCard &call_of(int local);
  const CallCard &current() const { return current_; }

  // Tells the neighbours where this call's input lies in the pool, if it does. Before post().
  void publish_input(const void *input, size_t bytes);
  void publish_shared(int number);
  SharedOutputs *outputs() { return outputs_.get(); }  // nullptr before the first was allocated

  // Waits for a request on the network, keeping the links going. Leader only.
  void await(const Request &request);

  // Sizes that suit this group, in bytes.
  size_t chunk_bytes() const { return chunk_bytes_; }
  size_t node_chunk_bytes() const { return node_chunk_bytes_; }  // of a node's block, on the net
  size_t stream_bytes() const { return stream_bytes_; }

  void set_timeout(int64_t ms) { timeout_ms_ = ms; }
  const std::string &name() const { return name_; }
  SlotWriter slots;
  const char *path = "";  // how the current call moves its bytes; for the trace

  // --- for the threads of the engine -----------------------------------------------------------
  std::mutex turn;  // held while a collective runs

 private:
  void raise(Counter &counter, uint32_t to);
  void await_counter(Counter &counter, uint32_t target, int local);
  bool poll_net(int timeout_us);
  void spread_over_cores(int core);
  void look_around(int awaited);  // slow path of every wait: throws if the wait is in vain
  [[noreturn]] void fail(nlc_status status, const std::string &reason);
  [[noreturn]] void fail_with(nlc_status status, const std::string &text);
  [[noreturn]] void time_out(int awaited);
  [[noreturn]] void fail_forming(int rank, const Failure &failure);
  void tell_nodes(int awaited);
  int slowest_neighbour();
  bool all_released(int number, uint32_t times);
  std::string call_text(const CallCard &call) const;
  std::string rank_text(int rank) const;
  CallCard describe_call(const nlc_call &call) const;

  std::string name_;
  std::vector<int64_t> global_ranks_;
  int64_t timeout_ms_;
  Card card_{};
  Fd segment_fd_;
  std::shared_ptr<Mapping> own_mapping_;
  Segment *own_ = nullptr;
  std::vector<Card> cards_;
  Topology place_;
  std::vector<Neighbour> neighbours_;
  std::unique_ptr<Liveness> liveness_;
  std::unique_ptr<Transport> net_;
  Fd output_fd_;
  std::shared_ptr<SharedOutputs> outputs_;
  std::mutex outputs_mutex_;
  Doorbell doorbell_;
  Patience patience_{2000, 20};
  size_t chunk_bytes_ = 256 << 10;
  size_t node_chunk_bytes_ = 128 << 10;
  size_t stream_bytes_ = 16 << 20;
  uint32_t steps_[kRings] = {0, 0, 0};
  uint64_t sequence_ = 0;
  CallCard current_{};
  int64_t call_timeout_ms_ = 0;
  Clock::time_point deadline_;
  Clock::time_point last_look_;
  Clock::time_point last_move_;
  int told_ = -1;       // the node that this leader told the others it waits for
  std::string broken_;  // why the group cannot be used any more
  nlc_status broken_status_ = NLC_OK;
  std::atomic<bool> aborted_{false};
  std::string abort_reason_;
  int pid_ = 0;
};

// The collectives: each in its own file, all ranks of the group call the same.
void all_gather(Group &group, const nlc_call &call);
void reduce_scatter(Group &group, const nlc_call &call);
void all_reduce(Group &group, const nlc_call &call);
void broadcast(Group &group, const nlc_call &call);
void barrier(Group &group);

}  // namespace nlc
