// Address and identity of a rank, exchanged as plain bytes before ranks can communicate.
#pragma once

#include <cstdint>

#include "base.h"

namespace nlc {

constexpr uint64_t kPeerInfoMagic = 0x6472616374656e6bULL;

struct PeerInfo {
  uint64_t magic;
  uint32_t abi;
  int32_t rank;
  int32_t size;
  int32_t pid;
  uint64_t started;  // start time of the process, which detects a reused pid
  uint64_t node[2];  // equal on ranks that can share memory
  uint64_t nonce;    // identifies this group on this rank
  int32_t segment_fd;
  int32_t arena_fd;      // pool of the process
  uint64_t arena_bytes;  // size of the pool, and of the memory of shared outputs
  int32_t output_fd;     // memory of this group's shared outputs
  int32_t doorbell_fd;   // doorbell of this rank if it leads its node
  int32_t cores;
  char host[64];
  char address[200];  // address of the transport; empty without one
  int32_t mail_fd;    // memory for the messages of this rank (mail_memory.h)
  char mail_address[64];  // for those of other nodes; empty without one
};
static_assert(sizeof(PeerInfo) <= NLC_PEER_INFO_BYTES);

// Fill in pid, start time, node, host and cores of this process. Ranks can share memory if they run
// under the same kernel, pid and network namespaces and user. NEARLINEAR_COLLECTIVES_NODE
// additionally splits a machine into emulated nodes.
void describe_this_process(PeerInfo *peer);

const PeerInfo &read_peer_info(const unsigned char *bytes);  // throws if the version differs

// Return true if the process of a peer on this node is known to have ended.
bool is_dead(const PeerInfo &peer);

}  // namespace nlc
