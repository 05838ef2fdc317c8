// The shared memory one rank gives to a group: counters, its current call, staging slots.
//
// Every rank owns one segment and maps those of its neighbours on the node. It writes only into
// its own, but for the leader's outbox (see Ring), so no two ranks ever write one cache line.
#pragma once

#include <atomic>
#include <cstdint>

#include "base.h"
#include "sync.h"

namespace nlc {

// Staging slots per ring: with a core for every rank so many that a slot has left its readers' own
// caches when it is filled again, from where it would have to be taken back; else few, which stay
// in the cache that all share. Only what is used of them costs memory.
constexpr uint32_t kSlots = 16;
constexpr uint32_t kFewSlots = 4;
constexpr size_t kSlotBytes = size_t{1} << 20;
constexpr int kSharedOutputs = 256;  // per group
constexpr int kCalls = 32;           // calls remembered for comparison; > kSlots

// One call as others see it: enough to notice that ranks called different things, and where the
// caller's memory lies if neighbours can read it.
struct CallCard {
  uint64_t sequence;
  uint64_t count;
  double scale;
  int32_t kind, dtype, reduce, root;
  int64_t input;   // offset in the caller's arena, or -1
  int64_t shared;  // number of the shared output that an all_gather is made into, or -1
};

// Staged data flows through a ring: in step s a rank fills slot s % slots_in_use of its own, raises
// `posted` to s + 1, reads its neighbours' slots of step s once their `posted` says so, and raises
// `consumed` to s + 1. A slot may be filled again when every neighbour has consumed it.
struct RingCounters {
  Counter posted;
  Counter consumed;
};

enum RingName { kInputs, kResults, kFromLeader, kRings };

struct Segment {
  std::atomic<uint64_t> nonce;                  // as on the owner's card
  uint32_t slots_in_use;                        // of each ring; the same on all ranks of a node
  Counter ready;                                // raised while the group is being formed
  alignas(64) std::atomic<uint32_t> listening;  // leader only: ring its doorbell (doorbell.h)
  alignas(64) std::atomic<uint64_t> entered;    // sequence number of the last call begun
  std::atomic<uint64_t> finished;               // and of the last call done
  std::atomic<int32_t> core;                    // where the owner last ran
  std::atomic<uint32_t> closed;                 // the owner has left the group in order
  std::atomic<uint32_t> failed;                 // nlc_status, set after `reason` is written
  char reason[1024];
  alignas(64) CallCard calls[kCalls];
  RingCounters rings[kRings];
  Counter released[kSharedOutputs];  // how often the owner has freed each shared output
  alignas(4096) unsigned char slots[kRings][kSlots][kSlotBytes];

  unsigned char *slot(RingName ring, uint32_t step) { return slots[ring][step % slots_in_use]; }
};

}  // namespace nlc
