// Vectors of one instruction set, and the element formats they are loaded from and stored to.
//
// No include guard: see reduce_template.h, which includes this. Vectors are the compiler's own
// (vector_size); the #if blocks contain everything that needs specific instructions.

namespace nlc {
namespace {

constexpr size_t kVector = NLC_VECTOR_BYTES;
constexpr size_t kLine = 64;    // streaming stores write whole cache lines
constexpr size_t kAhead = 512;  // prefetch distance in bytes, for 16-bit elements
constexpr int kSums = 8;        // accumulators at a time: half the registers of SSE2 and AVX2

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

// Store past the caches; `to` is aligned to a vector.
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

// Return true if a comparison holds for any lane.
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

// Lanes in which one of two vectors holds a NaN.
template <class Part>
inline Bytes either_nan(Part a, Part b) {
  return (Bytes)((a != a) | (b != b));
}

#if defined(__x86_64__) && NLC_VECTOR_BYTES == 32
inline Bytes either_nan(Float a, Float b) {  // one instruction; makes bfloat16 sums 10 % faster
  return (Bytes)_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q);
}
#endif

// A format converts a vector of elements in memory to kParts vectors to compute on, and back.

template <class T>
struct Plain {  // integers, float32, float64
  static constexpr size_t kElement = sizeof(T);
  static constexpr int kParts = 1;
  using Part = Vector<T>;
  static void unpack(Bytes bytes, Part *part) { part[0] = (Part)bytes; }
  static Bytes pack(const Part *part) { return (Bytes)part[0]; }
};

// Any non-zero byte is true; computed on as all ones, stored as 1.
struct Bool {
  static constexpr size_t kElement = 1;
  static constexpr int kParts = 1;
  using Part = Bytes;
  static void unpack(Bytes bytes, Part *part) { part[0] = (Bytes)(bytes != 0); }
  static Bytes pack(const Part *part) { return part[0] & 1; }
};

// A vector is treated as 32-bit words of two elements; the lower and the upper halves are computed
// on separately. No shuffles are needed, and every element returns to its place.
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
  // Round to nearest even in the upper half of the word. The NaN of finish() is unchanged.
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
#elif NLC_VECTOR_BYTES == 64  // with full masks: gcc 12 warns about the unmasked forms
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

  // In float32's fields a float16's exponent is 112 too small; one exact product corrects it,
  // including subnormals. Infinities and NaNs get float32's exponent for them.
  static Float widened(Word half) {
    const Word magnitude = (half & 0x7fffu) << 13;
    const Word finite = (Word)((Float)magnitude * 0x1p112f);
    const Word bits = magnitude < 0x0f800000u ? finite : (magnitude | 0x7f800000u);
    return (Float)(bits | ((half & 0x8000u) << 16));
  }

  // Round to nearest even. Below 2^-14, adding 0.5 rounds to the spacing of float16's subnormals,
  // 2^-24.
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

}  // namespace
}  // namespace nlc
