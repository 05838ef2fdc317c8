// Reduction loops for x86-64 processors with AVX2 and F16C, selected at run time so that the build
// needs no flags and the library runs anywhere.
#include "reduce_kernels.h"

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)

#include <immintrin.h>

namespace {

bool supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }

}  // namespace

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

#define NLC_VECTOR_BYTES 32
#include "reduce_template.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace nlc {

const Kernels *avx2_kernels() {
  static constexpr Kernels kernels = make_kernels("avx2");
  return supported() ? &kernels : nullptr;
}

}  // namespace nlc

#else

const nlc::Kernels *nlc::avx2_kernels() { return nullptr; }

#endif
