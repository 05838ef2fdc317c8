// Element-wise reductions over any number of sources, in the order the sources are given.
//
// Every element is reduced left to right: ((s0 op s1) op s2) ...; float16 and bfloat16 are
// accumulated in float32 and rounded once at the end. The result therefore depends on the
// sources' order and values alone, never on vector width, alignment, chunking or machine.
#pragma once

#include <cstddef>

#include "nearlinear_collectives.h"

namespace nlc {

size_t element_bytes(int dtype);
const char *dtype_name(int dtype);
const char *reduce_name(int reduce);

// Return true if the engine can reduce this dtype with this operation (bitwise: integers and bool;
// AVG: floating point only).
bool can_reduce(int dtype, int reduce);

// out[i] = scale * (sources[0][i] op ... op sources[n-1][i]) for i < count. NLC_AVG is a sum: the
// caller passes 1/ranks as scale. Integers ignore scale. out may be the memory of one of the
// sources at the same position. With stream, the output is written past the caches.
void reduce(int dtype, int reduce, const void *const *sources, int n, void *out, size_t count,
            double scale, bool stream);

}  // namespace nlc
