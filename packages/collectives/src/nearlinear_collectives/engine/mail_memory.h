// Shared memory of one rank for its messages with the ranks of its node (see mailbox.h).
//
// Every rank owns a Mail with a lane for each neighbour. Of the neighbours that it exchanges
// messages with, it maps the start of the Mail and its own lane. It writes only to its own Mail,
// except for the bell.
#pragma once

#include <atomic>
#include <cstdint>

#include "sync.h"

namespace nlc {

constexpr size_t kInside = size_t{32} << 10;       // largest message that travels in its envelope
constexpr size_t kChunkBytes = size_t{256} << 10;  // of longer messages
constexpr uint32_t kEnvelopes = 16, kAnswers = 64, kChunks = 4;
constexpr size_t kLargestPage = size_t{64} << 10;  // of any system
constexpr int64_t kLater = -1, kWithIt = -2;  // places of an envelope's data

// A message before its data.
struct Envelope {
  int64_t tag;
  uint64_t number;  // of the sender's messages to this rank
  uint64_t bytes;
  int64_t place;  // of the data: offset in the sender's pool, address in its process, or as above
  int32_t dtype;
  int32_t unused;
};

enum class Word : int32_t {
  kGrant = 1,  // a receive matches: send the data
  kDone = 2,   // the data has arrived
};

struct Answer {
  uint64_t number;  // of the message
  Word word;
  int32_t unused;
};

// Of the owner and one neighbour. The owner sends in the first part, and receives in the second.
struct alignas(kLargestPage) MailLane {
  alignas(64) std::atomic<uint32_t> envelopes_posted;
  alignas(64) std::atomic<uint32_t> chunks_filled;
  alignas(64) std::atomic<uint32_t> answers_read;
  alignas(64) std::atomic<uint32_t> envelopes_read;
  alignas(64) std::atomic<uint32_t> chunks_read;
  alignas(64) std::atomic<uint32_t> answers_posted;
  alignas(64) std::atomic<uint32_t> failed;  // nlc_status, set after `reason` is written
  char reason[768];
  Answer answers[kAnswers];
  struct {
    Envelope envelope;
    unsigned char data[kInside];
  } envelopes[kEnvelopes];
  alignas(4096) unsigned char chunks[kChunks][kChunkBytes];
};

struct Mail {
  Counter bell;                                 // rung by neighbours that have news for the owner
  alignas(64) std::atomic<uint32_t> listening;  // the owner sleeps: ring its doorbell (doorbell.h)
  alignas(64) std::atomic<int32_t> doorbell;    // descriptor in the owner's process
  MailLane lanes[1];  // one for each rank of the node

  static size_t bytes(int ranks_here) {
    return sizeof(Mail) + sizeof(MailLane) * static_cast<size_t>(ranks_here - 1);
  }
  static size_t lane_offset(int local) {
    return kLargestPage + sizeof(MailLane) * static_cast<size_t>(local);
  }
};

static_assert(sizeof(Mail) == kLargestPage + sizeof(MailLane));

}  // namespace nlc
