// What a rank tells the others about itself before they can talk: one card of plain bytes.
#pragma once

#include <cstdint>

#include "base.h"

namespace nlc {

constexpr uint64_t kCardMagic = 0x6472616374656e6bULL;

struct Card {
  uint64_t magic;
  uint32_t abi;
  int32_t rank;
  int32_t size;
  int32_t pid;
  uint64_t started;  // the process's start time, so that a reused pid is not taken for it
  uint64_t node[2];  // equal on ranks that can share memory
  uint64_t nonce;    // of this group on this rank
  int32_t segment_fd;
  int32_t arena_fd;      // the pool of the process
  uint64_t arena_bytes;  // and of the shared outputs' memory
  int32_t output_fd;     // of this group's shared outputs
  int32_t doorbell_fd;   // of this rank, should it lead its node
  int32_t cores;
  char host[64];
  char address[200];  // of the transport; empty if none
};
static_assert(sizeof(Card) <= NLC_CARD_BYTES);

// Fills pid, start time, node, host and cores of this process. Ranks share memory when they run
// under one kernel, one process and network namespace and one user;
// NEARLINEAR_COLLECTIVES_NODE splits a machine into pretended nodes on top of that.
void describe_this_process(Card *card);

const Card &read_card(const unsigned char *bytes);  // throws if it is none of this version

// Whether the process of a card on this node is known to have ended.
bool is_dead(const Card &card);

}  // namespace nlc
