// The reduction loops as templates over element format and operation.
//
// No include guard: reduce_baseline.cc, reduce_avx2.cc and reduce_avx512.cc each include this
// once, under their compiler target, with NLC_VECTOR_BYTES set. Everything is in an unnamed
// namespace, and standard headers come before the target is set, so that no code for a newer
// processor can be linked into an older one's path.
//
// Vectors are the compiler's own (vector_size), so the arithmetic below is written once; the
// three #if blocks hold what needs a processor's own instructions. No product is ever added to
// anything: there is nothing a compiler could contract to a fused multiply-add, which would round
// differently from machine to machine.

namespace nlc {
namespace {

constexpr size_t kVector = NLC_VECTOR_BYTES;
constexpr size_t kLine = 64;  // streaming stores write whole cache lines
constexpr int kTile = kVector >= kLine ? 2 : 4;  // vectors of each source at a time

template <class Lane, size_t bytes = kVector>
struct VectorOf {
  typedef Lane type __attribute__((vector_size(bytes)));
};
template <class Lane>
using Vector = typename VectorOf<Lane>::type;
using Bytes = Vector<uint8_t>;
using Word = Vector<uint32_t>;
using Float = Vector<float>;
using Double = Vector<double>;

inline Bytes load_bytes(const char *from) {
  Bytes value;
  std::memcpy(&value, from, kVector);
  return value;
}

// Past the caches; `to` is aligned to a vector.
inline void stream_bytes(char *to, Bytes value) {
#if defined(__x86_64__) && NLC_VECTOR_BYTES == 16
  _mm_stream_si128(reinterpret_cast<__m128i *>(to), (__m128i)value);
#elif defined(__x86_64__) && NLC_VECTOR_BYTES == 32
  _mm256_stream_si256(reinterpret_cast<__m256i *>(to), (__m256i)value);
#elif defined(__x86_64__)
  _mm512_stream_si512(reinterpret_cast<__m512i *>(to), (__m512i)value);
#else
  std::memcpy(to, &value, kVector);
#endif
}

// Whether a comparison holds for any lane.
inline bool any(Bytes mask) {
#if defined(__x86_64__) && NLC_VECTOR_BYTES == 16
  return _mm_movemask_epi8((__m128i)mask) != 0;
#elif defined(__x86_64__) && NLC_VECTOR_BYTES == 32
  return _mm256_movemask_epi8((__m256i)mask) != 0;
#elif defined(__x86_64__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  const auto lanes = (Vector<uint64_t>)mask;
  return (lanes[0] | lanes[1]) != 0;
#endif
}

// The factor for the result. A float product is right if the factor is a float; any other factor
// (1/3) is multiplied in double, which gives what a division by the number of ranks gives.
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

// Scales the sums, and writes all NaNs as one: which of two NaNs an addition returns differs
// between processors, and with the order in which a compiler puts the operands. To look for them,
// one sum of all the sums is enough: it is NaN if any is (or if infinities meet; no harm done).
template <class Part, int parts>
inline void finish(Part (&sum)[parts], const Scale &scale) {
  if (scale.wide != 1) {
    for (int p = 0; p < parts; ++p) sum[p] = scaled(sum[p], scale);
  }
  Part probe = sum[0];
  for (int p = 1; p < parts; ++p) probe += sum[p];
  if (__builtin_expect(any((Bytes)(probe != probe)), false)) {
    const Part nan = Part{} + __builtin_nanf("");
    for (int p = 0; p < parts; ++p) sum[p] = sum[p] == sum[p] ? sum[p] : nan;
  }
}

// Formats: how a vector of elements in memory becomes kParts vectors to compute on, and back.

template <class T>
struct Plain {  // integers, float32, float64
  static constexpr size_t kElement = sizeof(T);
  static constexpr int kParts = 1;
  using Part = Vector<T>;
  static void unpack(Bytes bytes, Part *part) { part[0] = (Part)bytes; }
  static Bytes pack(const Part *part) { return (Bytes)part[0]; }
};

// Any non-zero byte is true; computed on as all ones, written as 1.
struct Bool {
  static constexpr size_t kElement = 1;
  static constexpr int kParts = 1;
  using Part = Bytes;
  static void unpack(Bytes bytes, Part *part) { part[0] = (Bytes)(bytes != 0); }
  static Bytes pack(const Part *part) { return part[0] & 1; }
};

// A vector is seen as 32-bit words of two elements; those of the lower and those of the upper
// halves are computed on. No shuffles, and every element returns to its place.
struct Bfloat16 {
  static constexpr size_t kElement = 2;
  static constexpr int kParts = 2;
  using Part = Float;
  static void unpack(Bytes bytes, Part *part) {
    part[0] = (Float)((Word)bytes << 16);
    part[1] = (Float)((Word)bytes & 0xffff0000u);
  }
  static Bytes pack(const Part *part) {
    return (Bytes)((rounded(part[0]) >> 16) | (rounded(part[1]) & 0xffff0000u));
  }
  // Nearest even, in the upper half of the word. The one NaN of finish() stays what it is.
  static Word rounded(Float value) {
    const Word bits = (Word)value;
    return bits + 0x7fffu + ((bits >> 16) & 1u);
  }
};

struct Float16 {
  static constexpr size_t kElement = 2;
  static constexpr int kParts = 2;
  using Part = Float;

#if defined(__aarch64__)
  static void unpack(Bytes bytes, Part *part) {
    part[0] = (Float)vcvt_f32_f16(vget_low_f16((float16x8_t)bytes));
    part[1] = (Float)vcvt_high_f32_f16((float16x8_t)bytes);
  }
  static Bytes pack(const Part *part) {
    const float16x4_t lower = vcvt_f16_f32((float32x4_t)part[0]);
    return (Bytes)vcvt_high_f16_f32(lower, (float32x4_t)part[1]);
  }
#elif NLC_VECTOR_BYTES == 32
  static void unpack(Bytes bytes, Part *part) {
    part[0] = (Float)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)bytes));
    part[1] = (Float)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)bytes, 1));
  }
  static Bytes pack(const Part *part) {
    const __m128i lower = _mm256_cvtps_ph((__m256)part[0], _MM_FROUND_TO_NEAREST_INT);
    const __m128i upper = _mm256_cvtps_ph((__m256)part[1], _MM_FROUND_TO_NEAREST_INT);
    return (Bytes)_mm256_set_m128i(upper, lower);
  }
#elif NLC_VECTOR_BYTES == 64  // with full masks: gcc 12 warns about the forms without
  static void unpack(Bytes bytes, Part *part) {
    const __m256i lower = _mm512_maskz_extracti64x4_epi64(0xf, (__m512i)bytes, 0);
    const __m256i upper = _mm512_maskz_extracti64x4_epi64(0xf, (__m512i)bytes, 1);
    part[0] = (Float)_mm512_maskz_cvtph_ps(0xffff, lower);
    part[1] = (Float)_mm512_maskz_cvtph_ps(0xffff, upper);
  }
  static __m256i rounded(Float value) {
    return _mm512_maskz_cvtps_ph(0xffff, (__m512)value, _MM_FROUND_TO_NEAREST_INT);
  }
  static Bytes pack(const Part *part) {
    const __m512i lower = _mm512_castsi256_si512(rounded(part[0]));
    return (Bytes)_mm512_maskz_inserti64x4(0xff, lower, rounded(part[1]), 1);
  }
#else
  static void unpack(Bytes bytes, Part *part) {
    part[0] = widened((Word)bytes & 0xffffu);
    part[1] = widened((Word)bytes >> 16);
  }
  static Bytes pack(const Part *part) {
    return (Bytes)(rounded(part[0]) | (rounded(part[1]) << 16));
  }

  // Put in float32's fields, a float16's exponent is 112 too small: one exact product mends that,
  // subnormals included. Infinities and NaNs get the exponent that means so in float32.
  static Float widened(Word half) {
    const Word magnitude = (half & 0x7fffu) << 13;
    const Word finite = (Word)((Float)magnitude * 0x1p112f);
    const Word bits = magnitude < 0x0f800000u ? finite : (magnitude | 0x7f800000u);
    return (Float)(bits | ((half & 0x8000u) << 16));
  }

  // Nearest even. Below 2^-14, adding 0.5 rounds to the spacing of float16's subnormals, 2^-24.
  static Word rounded(Float value) {
    const Word sign = (Word)value & 0x80000000u;
    const Word bits = (Word)value ^ sign;
    const Word normal = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    const Word subnormal = (Word)((Float)bits + 0.5f) - 0x3f000000u;
    const Word finite = bits < 0x38800000u ? subnormal : normal;
    const Word infinite = Word{} + 0x7c00u;
    const Word nan = Word{} + 0x7e00u;
    const Word half = bits < 0x477ff000u ? finite : bits <= 0x7f800000u ? infinite : nan;
    return half | (sign >> 16);
  }
#endif
};

// Operations. Integers are unsigned where that only means that overflow wraps.

struct Sum {
  template <class V>
  static V of(V a, V b) { return a + b; }
};
struct Product {
  template <class V>
  static V of(V a, V b) { return a * b; }
};
struct Min {  // of equal values (0 and -0) the first; a NaN stays
  template <class V>
  static V of(V a, V b) { return ((b < a) | (b != b)) ? b : a; }
};
struct Max {
  template <class V>
  static V of(V a, V b) { return ((b > a) | (b != b)) ? b : a; }
};
struct And {
  template <class V>
  static V of(V a, V b) { return a & b; }
};
struct Or {
  template <class V>
  static V of(V a, V b) { return a | b; }
};
struct Xor {
  template <class V>
  static V of(V a, V b) { return a ^ b; }
};

template <class Part>
constexpr bool is_floating = std::is_same_v<Part, Float> || std::is_same_v<Part, Double>;

// `units` vectors from each source, `at` bytes in. All are read before the output is written,
// which may be one of them.
template <class Format, class Op, int units>
[[gnu::always_inline]] inline void reduce_vectors(const void *const *sources, int n, char *out,
                                                  size_t at, const Scale &scale, bool stream) {
  constexpr int parts = Format::kParts;
  typename Format::Part sum[units * parts], next[parts];
  const char *from = static_cast<const char *>(sources[0]) + at;
  for (int u = 0; u < units; ++u) Format::unpack(load_bytes(from + u * kVector), sum + u * parts);
  for (int s = 1; s < n; ++s) {
    from = static_cast<const char *>(sources[s]) + at;
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

// Fewer bytes than a vector: the same by way of a staging vector, padded with zeros nobody reads.
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
  char *out = static_cast<char *>(output);
  const size_t bytes = count * Format::kElement;
  size_t at = 0;
  const size_t head = -reinterpret_cast<uintptr_t>(out) % kLine;
  stream = stream && head % Format::kElement == 0 && bytes >= head + kTile * kVector;
  while (stream && at < head) {
    const size_t step = head - at < kVector ? head - at : kVector;
    reduce_bytes<Format, Op>(sources, n, out, at, step, scale);
    at += step;
  }
  for (; bytes - at >= kTile * kVector; at += kTile * kVector) {
    reduce_vectors<Format, Op, kTile>(sources, n, out, at, scale, stream);
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
