// Reduction loops for x86-64 processors with AVX-512, selected at run time so that the build needs
// no flags and the library runs anywhere.
#include "reduce_kernels.h"

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)

#include <immintrin.h>

namespace {

bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#define NLC_VECTOR_BYTES 64
#include "reduce_template.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace nlc {

const Kernels *avx512_kernels() {
  static constexpr Kernels kernels = make_kernels("avx512");
  return supported() ? &kernels : nullptr;
}

}  // namespace nlc

#else

const nlc::Kernels *nlc::avx512_kernels() { return nullptr; }

#endif
