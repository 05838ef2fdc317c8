// Copies between private and shared memory: plain, or past the caches.
#pragma once

#include <cstddef>

namespace nlc {

// Outputs at least this big leave the last-level cache before anyone reads them, so writing them
// through it only evicts what others need: about this rank's share of the cache.
size_t stream_threshold(int ranks_on_node);

// Copies bytes; with stream, by non-temporal stores (a fence is issued before returning).
void copy(void *to, const void *from, size_t bytes, bool stream);

// Copies into shared memory that other cores have read and will read again: past the caches unless
// it is little. Writing through them would first take every line back from those cores, which costs
// a quarter of a microsecond a line where they do not share a cache (in another core complex or
// socket), four times what reading from memory does.
void copy_to_slot(void *to, const void *from, size_t bytes);

}  // namespace nlc
