// Shared memory of one rank in a group: counters, its current call, staging slots.
//
// Every rank owns one segment and maps those of its neighbours on the node. It writes only to its
// own, except for the leader's outbox (see Ring), so two ranks never write to the same cache line.
#pragma once

#include <atomic>
#include <cstdint>

#include "base.h"
#include "sync.h"

namespace nlc {

// Staging slots per ring. With a core for every rank there are so many that a slot has left its
// readers' caches when it is filled again, which saves taking its lines back. Otherwise there are
// few, which stay in the cache that all ranks share. Only used slots cost memory.
constexpr uint32_t kSlots = 16;
constexpr uint32_t kFewSlots = 4;
constexpr size_t kSlotBytes = size_t{1} << 20;
constexpr size_t kSmallestPiece = 64;  // bytes of a rank in a slot that ranks of all nodes share
constexpr int kSharedOutputs = 256;  // per group
constexpr int kCalls = 32;           // calls remembered for comparison; > kSlots

// One call as seen by other ranks: enough to detect mismatching calls, and the location of the
// caller's memory if neighbours can read it.
struct CallSignature {
  uint64_t sequence;
  uint64_t count;
  double scale;
  int32_t kind, dtype, reduce, root;
  int64_t input;   // offset in the caller's arena, or -1
  int64_t shared;  // number of the shared output of an all_gather, or -1
};

// Staged data flows through a ring: in step s a rank fills its slot s % slots_in_use, raises
// `posted` to s + 1, reads its neighbours' slots of step s once their `posted` allows it, and
// raises `consumed` to s + 1. A slot may be filled again when every neighbour has consumed it.
struct RingCounters {
  Counter posted;
  Counter consumed;
};

enum RingName { kInputs, kResults, kFromLeader, kRings };

struct Segment {
  std::atomic<uint64_t> nonce;                  // as in the owner's PeerInfo
  uint32_t slots_in_use;                        // of each ring; identical on all ranks of a node
  uint64_t chunk_bytes;                         // that the owner would choose
  Counter ready;                                // raised while the group is formed
  alignas(64) std::atomic<uint32_t> listening;  // leader only: ring its doorbell (doorbell.h)
  alignas(64) std::atomic<uint64_t> entered;    // sequence number of the last call begun
  std::atomic<uint64_t> finished;               // sequence number of the last completed call
  std::atomic<int32_t> core;                    // core on which the owner last ran
  std::atomic<uint32_t> closed;                 // set when the owner leaves the group in order
  std::atomic<uint32_t> failed;                 // nlc_status, set after `reason` is written
  char reason[1024];
  alignas(64) CallSignature calls[kCalls];
  RingCounters rings[kRings];
  Counter released[kSharedOutputs];  // number of times the owner freed each shared output
  alignas(4096) unsigned char slots[kRings][kSlots][kSlotBytes];

  unsigned char *slot(RingName ring, uint32_t step) { return slots[ring][step % slots_in_use]; }
};

}  // namespace nlc
