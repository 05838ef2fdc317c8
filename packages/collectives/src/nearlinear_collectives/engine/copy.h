// Copies between private and shared memory: plain, or past the caches.
#pragma once

#include <cstddef>

namespace nlc {

// Outputs at least this big leave the last-level cache before anyone reads them, so writing them
// through it only evicts what others need: about this rank's share of the cache.
size_t stream_threshold(int ranks_on_node);

// Copies bytes; with stream, by non-temporal stores (a fence is issued before returning).
void copy(void *to, const void *from, size_t bytes, bool stream);

}  // namespace nlc
