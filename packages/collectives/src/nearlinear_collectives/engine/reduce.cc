// Dispatch of reductions, and rules of every loop beyond reduce.h:
//   integers wrap; any non-zero bool is true: sum and maximum are "or", product and minimum "and";
//   minimum and maximum return NaN if any source is NaN, and of equal values (0 and -0) the first;
//   a NaN result is always the same quiet NaN, independent of sign and payload.
#include "reduce.h"

#include <cstdint>

#include "reduce_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nlc {

namespace {

// A program may have set its threads to flush subnormal numbers to zero or to another rounding
// mode. Results must not depend on the thread, so the default is set here.
class DefaultRounding {
 public:
#if defined(__x86_64__)
  DefaultRounding() : saved_(_mm_getcsr()) {
    if ((saved_ & ~kFlags) != kDefault) _mm_setcsr(kDefault);
  }
  ~DefaultRounding() {
    if ((saved_ & ~kFlags) != kDefault) _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kFlags = 0x3f;      // status bits, not control bits
  static constexpr unsigned kDefault = 0x1f80;  // no exceptions trap, nearest even, subnormals
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultRounding() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    if (saved_ != 0) asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~DefaultRounding() {
    if (saved_ != 0) asm volatile("msr fpcr, %0" : : "r"(saved_));
  }

 private:
  uint64_t saved_;
#else
  DefaultRounding() {}
#endif
  DefaultRounding(const DefaultRounding &) = delete;
};

const Kernels &best_kernels() {
  static const Kernels &best = [&]() -> const Kernels & {
    if (const Kernels *kernels = avx512_kernels()) return *kernels;
    if (const Kernels *kernels = avx2_kernels()) return *kernels;
    return baseline_kernels();
  }();
  return best;
}

struct Dtype {
  const char *name;
  size_t bytes;
};

constexpr Dtype kDtypes[NLC_DTYPES] = {
    {"uint8", 1},   {"int8", 1},     {"int16", 2},   {"int32", 4},   {"int64", 8},
    {"float16", 2}, {"bfloat16", 2}, {"float32", 4}, {"float64", 8}, {"bool", 1},
};

constexpr const char *kReduces[NLC_REDUCES] = {
    "sum", "average", "product", "minimum", "maximum", "bitwise and", "bitwise or", "bitwise xor",
};

bool is_dtype(int dtype) { return dtype >= 0 && dtype < NLC_DTYPES; }
bool is_reduce(int reduce) { return reduce >= 0 && reduce < NLC_REDUCES; }

}  // namespace

size_t element_bytes(int dtype) { return is_dtype(dtype) ? kDtypes[dtype].bytes : 0; }

const char *dtype_name(int dtype) {
  return is_dtype(dtype) ? kDtypes[dtype].name : "unknown dtype";
}

const char *reduce_name(int reduce) {
  return is_reduce(reduce) ? kReduces[reduce] : "unknown reduction";
}

bool can_reduce(int dtype, int reduce) {
  return is_dtype(dtype) && is_reduce(reduce) && baseline_kernels().of[dtype][reduce] != nullptr;
}

void reduce(int dtype, int reduce, const void *const *sources, int n, void *out, size_t count,
            double scale, bool stream) {
  const DefaultRounding rounding;
  best_kernels().of[dtype][reduce](sources, n, out, count, scale, stream);
}

}  // namespace nlc
