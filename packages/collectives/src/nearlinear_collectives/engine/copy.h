// Copies between private and shared memory, through the caches or with non-temporal stores.
#pragma once

#include <cstddef>

namespace nlc {

// Minimum size of outputs written past the caches: about this rank's share of the last-level cache.
// Larger outputs would be evicted before anyone reads them.
size_t stream_threshold(int ranks_on_node);

// Copy bytes. With stream, use non-temporal stores and issue a fence before returning.
void copy(void *to, const void *from, size_t bytes, bool stream);

}  // namespace nlc
