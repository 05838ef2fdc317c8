// The reduction loops, compiled once for each instruction set. All of them give the same bits.
#pragma once

#include <cstddef>

#include "nearlinear_collectives.h"

namespace nlc {

// As nlc::reduce(), with dtype and operation chosen.
using Kernel = void (*)(const void *const *sources, int n, void *out, size_t count, double scale,
                        bool stream);

struct Kernels {
  const char *instruction_set;
  Kernel of[NLC_DTYPES][NLC_REDUCES];  // nullptr: that dtype has no such operation
};

// 16-byte vectors in portable C++: SSE2 on x86-64, NEON on aarch64. Runs everywhere.
const Kernels &baseline_kernels();

// nullptr where this machine cannot run them.
const Kernels *avx2_kernels();
const Kernels *avx512_kernels();

}  // namespace nlc
