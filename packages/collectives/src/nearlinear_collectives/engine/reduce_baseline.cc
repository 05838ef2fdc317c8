// Reduction loops for any processor.
#include "reduce_kernels.h"

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define NLC_VECTOR_BYTES 16
#include "reduce_template.h"

namespace nlc {

const Kernels &baseline_kernels() {
  static constexpr Kernels kernels = make_kernels("baseline");
  return kernels;
}

}  // namespace nlc
