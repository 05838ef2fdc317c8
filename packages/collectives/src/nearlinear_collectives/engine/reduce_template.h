// Reduction loops as templates over element format and operation.
//
// No include guard: reduce_baseline.cc, reduce_avx2.cc and reduce_avx512.cc each include this once,
// under their compiler target, with NLC_VECTOR_BYTES set. Everything is in an unnamed namespace,
// and standard headers are included before the target is set, so that code for a newer processor
// cannot be linked into an older one's path.
//
// No product is ever added to anything, so a compiler cannot contract to a fused multiply-add,
// which would round differently between machines.

#include "reduce_formats.h"

namespace nlc {
namespace {

// Apply the factor of the result. A float product is exact enough if the factor is a float; any
// other factor (1/3) is multiplied in double, which equals a division by the number of ranks.
struct Scale {
  explicit Scale(double scale) : wide(scale), narrow(static_cast<float>(scale)) {}
  double wide;
  float narrow;
};

inline Double scaled(Double value, const Scale &scale) { return value * scale.wide; }

inline Float scaled(Float value, const Scale &scale) {
  if (scale.narrow == scale.wide) return value * scale.narrow;
  using Wide = VectorOf<double, 2 * kVector>::type;
  return __builtin_convertvector(__builtin_convertvector(value, Wide) * scale.wide, Float);
}

// Scale the sums, and store all NaNs as one: the NaN that an addition of two NaNs returns differs
// between processors, and with the compiler's operand order.
template <class Part, int parts>
inline void finish(Part (&sum)[parts], const Scale &scale) {
  if (scale.wide != 1) {
    for (int p = 0; p < parts; ++p) sum[p] = scaled(sum[p], scale);
  }
  Bytes nans = either_nan(sum[0], sum[parts - 1]);
  for (int p = 1; p + 1 < parts; p += 2) nans |= either_nan(sum[p], sum[p + 1]);
  if (__builtin_expect(any(nans), false)) {
    const Part nan = Part{} + __builtin_nanf("");
    for (int p = 0; p < parts; ++p) sum[p] = sum[p] == sum[p] ? sum[p] : nan;
  }
}

// Operations. Integers are unsigned where the only effect is that overflow wraps.

struct Sum {
  template <class V>
  static V of(V a, V b) {
    return a + b;
  }
};
struct Product {
  template <class V>
  static V of(V a, V b) {
    return a * b;
  }
};
struct Min {  // of equal values (0 and -0) the first; NaN is propagated
  template <class V>
  static V of(V a, V b) {
    return ((b < a) | (b != b)) ? b : a;
  }
};
struct Max {
  template <class V>
  static V of(V a, V b) {
    return ((b > a) | (b != b)) ? b : a;
  }
};
struct And {
  template <class V>
  static V of(V a, V b) {
    return a & b;
  }
};
struct Or {
  template <class V>
  static V of(V a, V b) {
    return a | b;
  }
};
struct Xor {
  template <class V>
  static V of(V a, V b) {
    return a ^ b;
  }
};

template <class Part>
constexpr bool is_floating = std::is_same_v<Part, Float> || std::is_same_v<Part, Double>;

// Called for each source's part of a tile. The conversion of 16-bit elements keeps the processor so
// busy that its own prefetching falls behind; float32 is slower with explicit prefetching.
template <class Format, int units>
inline void prefetch(const char *from) {
  if constexpr (Format::kParts > 1 && units > 1) {
    for (size_t at = 0; at < units * kVector; at += kLine) __builtin_prefetch(from + kAhead + at);
  }
}

// Reduce `units` vectors of each source, starting `at` bytes in. All are read before the output is
// written, which may be one of the sources.
template <class Format, class Op, int units>
[[gnu::always_inline]] inline void reduce_vectors(const void *const *sources, int n, char *out,
                                                  size_t at, const Scale &scale, bool stream) {
  constexpr int parts = Format::kParts;
  typename Format::Part sum[units * parts], next[parts];
  const char *from = static_cast<const char *>(sources[0]) + at;
  prefetch<Format, units>(from);
  for (int u = 0; u < units; ++u) Format::unpack(load_bytes(from + u * kVector), sum + u * parts);
  for (int s = 1; s < n; ++s) {
    from = static_cast<const char *>(sources[s]) + at;
    prefetch<Format, units>(from);
    for (int u = 0; u < units; ++u) {
      Format::unpack(load_bytes(from + u * kVector), next);
      for (int p = 0; p < parts; ++p) sum[u * parts + p] = Op::of(sum[u * parts + p], next[p]);
    }
  }
  if constexpr (is_floating<typename Format::Part>) finish(sum, scale);
  for (int u = 0; u < units; ++u) {
    const Bytes value = Format::pack(sum + u * parts);
    char *to = out + at + u * kVector;
    if (stream) {
      stream_bytes(to, value);
    } else {
      std::memcpy(to, &value, kVector);
    }
  }
}

// Reduce fewer bytes than a vector with a staging vector, padded with zeros.
template <class Format, class Op>
void reduce_bytes(const void *const *sources, int n, char *out, size_t at, size_t bytes,
                  const Scale &scale) {
  constexpr int parts = Format::kParts;
  typename Format::Part sum[parts], next[parts];
  char staged[kVector] = {};
  std::memcpy(staged, static_cast<const char *>(sources[0]) + at, bytes);
  Format::unpack(load_bytes(staged), sum);
  for (int s = 1; s < n; ++s) {
    std::memcpy(staged, static_cast<const char *>(sources[s]) + at, bytes);
    Format::unpack(load_bytes(staged), next);
    for (int p = 0; p < parts; ++p) sum[p] = Op::of(sum[p], next[p]);
  }
  if constexpr (is_floating<typename Format::Part>) finish(sum, scale);
  const Bytes value = Format::pack(sum);
  std::memcpy(out + at, &value, bytes);
}

template <class Format, class Op>
void kernel(const void *const *sources, int n, void *output, size_t count, double factor,
            bool stream) {
  const Scale scale(factor);
  constexpr int units = kSums / Format::kParts;
  constexpr size_t tile = units * kVector;
  char *out = static_cast<char *>(output);
  const size_t bytes = count * Format::kElement;
  size_t at = 0;
  const size_t head = -reinterpret_cast<uintptr_t>(out) % kLine;
  stream = stream && head % Format::kElement == 0 && bytes >= head + tile;
  while (stream && at < head) {
    const size_t step = head - at < kVector ? head - at : kVector;
    reduce_bytes<Format, Op>(sources, n, out, at, step, scale);
    at += step;
  }
  for (; bytes - at >= tile; at += tile) {
    reduce_vectors<Format, Op, units>(sources, n, out, at, scale, stream);
  }
  for (; bytes - at >= kVector; at += kVector) {
    reduce_vectors<Format, Op, 1>(sources, n, out, at, scale, false);
  }
  if (at < bytes) reduce_bytes<Format, Op>(sources, n, out, at, bytes - at, scale);
#if defined(__x86_64__)
  if (stream) _mm_sfence();
#endif
}

template <class Format>
constexpr void add_arithmetic(Kernel *row) {
  row[NLC_SUM] = kernel<Format, Sum>;
  row[NLC_PRODUCT] = kernel<Format, Product>;
}

template <class Format>
constexpr void add_order(Kernel *row) {
  row[NLC_MIN] = kernel<Format, Min>;
  row[NLC_MAX] = kernel<Format, Max>;
}

template <class Format>
constexpr void add_bitwise(Kernel *row) {
  row[NLC_BAND] = kernel<Format, And>;
  row[NLC_BOR] = kernel<Format, Or>;
  row[NLC_BXOR] = kernel<Format, Xor>;
}

template <class T>
constexpr void add_integer(Kernel *row) {
  add_arithmetic<Plain<std::make_unsigned_t<T>>>(row);
  add_order<Plain<T>>(row);
  add_bitwise<Plain<std::make_unsigned_t<T>>>(row);
}

template <class Format>
constexpr void add_floating(Kernel *row) {
  add_arithmetic<Format>(row);
  add_order<Format>(row);
  row[NLC_AVG] = row[NLC_SUM];  // the caller's scale makes it an average
}

constexpr Kernels make_kernels(const char *instruction_set) {
  Kernels kernels{instruction_set, {}};
  add_integer<uint8_t>(kernels.of[NLC_UINT8]);
  add_integer<int8_t>(kernels.of[NLC_INT8]);
  add_integer<int16_t>(kernels.of[NLC_INT16]);
  add_integer<int32_t>(kernels.of[NLC_INT32]);
  add_integer<int64_t>(kernels.of[NLC_INT64]);
  add_floating<Float16>(kernels.of[NLC_FLOAT16]);
  add_floating<Bfloat16>(kernels.of[NLC_BFLOAT16]);
  add_floating<Plain<float>>(kernels.of[NLC_FLOAT32]);
  add_floating<Plain<double>>(kernels.of[NLC_FLOAT64]);
  Kernel *truth = kernels.of[NLC_BOOL];
  add_bitwise<Bool>(truth);
  truth[NLC_SUM] = truth[NLC_MAX] = truth[NLC_BOR];
  truth[NLC_PRODUCT] = truth[NLC_MIN] = truth[NLC_BAND];
  return kernels;
}

}  // namespace
}  // namespace nlc
