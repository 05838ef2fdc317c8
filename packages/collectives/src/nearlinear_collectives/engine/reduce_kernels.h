// Reduction loops, compiled once per instruction set. All give the same bits.
#pragma once

#include <cstddef>

#include "nearlinear_collectives.h"

namespace nlc {

// Like nlc::reduce(), for one dtype and operation.
using Kernel = void (*)(const void *const *sources, int n, void *out, size_t count, double scale,
                        bool stream);

struct Kernels {
  const char *instruction_set;
  Kernel of[NLC_DTYPES][NLC_REDUCES];  // nullptr for operations that the dtype lacks
};

// 16-byte vectors in portable C++: SSE2 on x86-64, NEON on aarch64. Runs everywhere.
const Kernels &baseline_kernels();

// nullptr if this machine cannot run them.
const Kernels *avx2_kernels();
const Kernels *avx512_kernels();

}  // namespace nlc
