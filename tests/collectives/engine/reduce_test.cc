// Bitwise comparison of reductions with an element-wise reference: every loop that this machine can
// run, every dtype and operation.
//
//   cd tests/collectives/engine &&
//   ENGINE=../../../packages/collectives/src/nearlinear_collectives/engine g++ -std=c++20 -g -O1
//   -Wall -Wextra -fsanitize=address,undefined -fno-sanitize-recover=all
//       -I$ENGINE reduce_test.cc $ENGINE/reduce{,_baseline,_avx2,_avx512}.cc -o reduce_test
//   ./reduce_test [random cases per loop]
#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "reduce.h"
#include "reduce_kernels.h"

#include "check.h"

namespace {

using Raw = uint64_t;  // bytes of an element, zero-extended
std::mt19937_64 random_bits(20240229);

size_t random_below(size_t limit) { return random_bits() % limit; }

bool is_float(int dtype) { return dtype >= NLC_FLOAT16 && dtype <= NLC_FLOAT64; }

constexpr size_t kBytes[NLC_DTYPES] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1};
constexpr Raw kNan[NLC_DTYPES] = {0, 0, 0, 0, 0, 0x7e00, 0x7fc0, 0x7fc00000, 0x7ff8ull << 48, 0};
constexpr Raw kInfinity[NLC_DTYPES] = {0, 0, 0, 0, 0, 0x7c00, 0x7f80, 0x7f800000, 0x7ff0ull << 48,
                                       0};

bool is_finite(int dtype, Raw raw) { return (raw & kInfinity[dtype]) != kInfinity[dtype]; }

// Reference of a 16-bit format: the values of its non-negative bit patterns, in order.
struct Format16 {
  explicit Format16(int mantissa_bits) : infinity(0x7fff & (0xffff << mantissa_bits)) {
    const int bias = (1 << (14 - mantissa_bits)) - 1;
    // The next value after the largest, in place of infinity; values from half way on round to it.
    for (Raw pattern = 0; pattern <= infinity; ++pattern) {
      const int exponent = static_cast<int>(pattern >> mantissa_bits);
      const Raw mantissa = pattern & ((1u << mantissa_bits) - 1);
      values.push_back(
          std::ldexp(static_cast<double>(exponent ? mantissa + (1u << mantissa_bits) : mantissa),
                     std::max(exponent, 1) - bias - mantissa_bits));
    }
  }

  double decode(Raw raw) const {
    const Raw pattern = raw & 0x7fff;
    const double value = pattern > infinity    ? std::numeric_limits<double>::quiet_NaN()
                         : pattern == infinity ? std::numeric_limits<double>::infinity()
                                               : values[pattern];
    return raw & 0x8000 ? -value : value;
  }

  Raw encode(double value) const {  // not for NaN
    const Raw sign = std::signbit(value) ? 0x8000 : 0;
    const double size = std::fabs(value);
    if (size >= values.back()) return sign | infinity;
    const Raw below = std::upper_bound(values.begin(), values.end(), size) - values.begin() - 1;
    const double to_below = size - values[below], to_above = values[below + 1] - size;
    const bool up = to_above < to_below || (to_above == to_below && below % 2 == 1);
    return sign | (below + up);
  }

  Raw infinity;
  std::vector<double> values;
};
const Format16 kFloat16(10), kBfloat16(7);

template <class T>
T value_of(Raw raw) {
  T value;
  std::memcpy(&value, &raw, sizeof(T));
  return value;
}

template <class T>
Raw raw_of(T value) {
  Raw raw = 0;
  std::memcpy(&raw, &value, sizeof(T));
  return raw;
}

template <class T>
T combine(int op, T a, T b) {
  switch (op) {
    case NLC_SUM:
    case NLC_AVG: return a + b;
    case NLC_PRODUCT: return a * b;
    case NLC_MIN: return std::isnan(a) || std::isnan(b) ? a + b : b < a ? b : a;
    default: return std::isnan(a) || std::isnan(b) ? a + b : b > a ? b : a;
  }
}

Raw combine_integers(int dtype, int op, Raw a, Raw b) {  // in the widest type; truncated afterwards
  const bool is_signed = dtype >= NLC_INT8 && dtype <= NLC_INT64;
  const bool less = is_signed ? static_cast<int64_t>(b) < static_cast<int64_t>(a) : b < a;
  switch (op) {
    case NLC_SUM: return a + b;
    case NLC_PRODUCT: return a * b;
    case NLC_MIN: return less ? b : a;
    case NLC_MAX: return less ? a : b;
    case NLC_BAND: return a & b;
    case NLC_BOR: return a | b;
    default: return a ^ b;
  }
}

float scaled(float value, double scale) {
  return static_cast<float>(static_cast<double>(value) * scale);
}

// Reference definition for all loops.
Raw expected(int dtype, int op, const std::vector<Raw> &elements, double scale) {
  if (dtype == NLC_FLOAT64) {
    double sum = value_of<double>(elements[0]);
    for (size_t s = 1; s < elements.size(); ++s)
      sum = combine(op, sum, value_of<double>(elements[s]));
    sum *= scale;
    return std::isnan(sum) ? kNan[dtype] : raw_of(sum);
  }
  if (is_float(dtype)) {
    auto decode = [&](Raw raw) {
      if (dtype == NLC_FLOAT32) return value_of<float>(raw);
      return static_cast<float>((dtype == NLC_FLOAT16 ? kFloat16 : kBfloat16).decode(raw));
    };
    float sum = decode(elements[0]);
    for (size_t s = 1; s < elements.size(); ++s) sum = combine(op, sum, decode(elements[s]));
    sum = scaled(sum, scale);
    if (std::isnan(sum)) return kNan[dtype];
    if (dtype == NLC_FLOAT32) return raw_of(sum);
    return (dtype == NLC_FLOAT16 ? kFloat16 : kBfloat16).encode(sum);
  }
  if (dtype == NLC_BOOL) {
    size_t truths = 0;
    for (const Raw element : elements) truths += element != 0;
    if (op == NLC_SUM || op == NLC_MAX || op == NLC_BOR) return truths > 0;
    return op == NLC_BXOR ? truths % 2 : truths == elements.size();
  }
  const int unused = 64 - 8 * static_cast<int>(kBytes[dtype]);
  auto extended = [&](Raw raw) {
    return dtype == NLC_UINT8 ? raw
                              : static_cast<Raw>(static_cast<int64_t>(raw << unused) >> unused);
  };
  Raw value = extended(elements[0]);
  for (size_t s = 1; s < elements.size(); ++s) {
    value = combine_integers(dtype, op, value, extended(elements[s]));
  }
  return value << unused >> unused;
}

// Values that often break reductions: limits, zeros of both signs, infinities, NaNs, subnormals.
Raw random_element(int dtype) {
  const int bits = 8 * static_cast<int>(kBytes[dtype]);
  const Raw any = random_bits() >> (64 - bits);
  if (dtype == NLC_BOOL) return random_below(3) ? random_below(2) : any;
  if (!is_float(dtype)) {
    const Raw special[] = {0, 1, ~Raw{0}, Raw{1} << (bits - 1), (Raw{1} << (bits - 1)) - 1};
    return random_below(4) ? any : special[random_below(5)] << (64 - bits) >> (64 - bits);
  }
  const double near_one = static_cast<double>(random_below(4096)) / 1024 - 2;
  const Raw sign = random_below(2) << (bits - 1);
  switch (random_below(16)) {
    case 0: return any & ~kInfinity[dtype];  // subnormal
    case 1: return sign;
    case 2: return sign | kInfinity[dtype];
    case 3: return any | kInfinity[dtype];  // most often NaN
    case 4:
    case 5:
    case 6:
    case 7: return any;
    default:
      return dtype == NLC_FLOAT64 ? raw_of(near_one)
             : dtype == NLC_FLOAT32
                 ? raw_of(static_cast<float>(near_one))
                 : (dtype == NLC_FLOAT16 ? kFloat16 : kBfloat16).encode(near_one);
  }
}

// Elements at any address, at the end of a block of their own: a sanitizer detects every access
// outside, and the bytes before and after detect writes without one.
struct Array {
  Array(int dtype, size_t count, size_t offset, bool guarded)
      : element(kBytes[dtype]),
        count(count),
        before(offset),
        after(guarded ? 80 : 0),
        block(new unsigned char[offset + count * element + after]) {
    std::fill_n(block.get(), before + count * element + after, kGuard);
  }

  char *data() const { return reinterpret_cast<char *>(block.get()) + before; }
  Raw get(size_t i) const {
    Raw raw = 0;
    std::memcpy(&raw, data() + i * element, element);
    return raw;
  }
  void set(size_t i, Raw raw) { std::memcpy(data() + i * element, &raw, element); }
  bool guards_stand() const {
    const unsigned char *end = block.get() + before + count * element;
    auto untouched = [](unsigned char byte) { return byte == kGuard; };
    return std::all_of(block.get(), block.get() + before, untouched) &&
           std::all_of(end, end + after, untouched);
  }

  static constexpr unsigned char kGuard = 0xa5;
  size_t element, count, before, after;
  std::unique_ptr<unsigned char[]> block;
};

struct Loop {
  const nlc::Kernels &set;
  int dtype, op;
};

// A call with its sources given element by element.
void run(const Loop &loop, const std::vector<std::vector<Raw>> &elements, double scale, bool stream,
         bool odd_addresses) {
  const size_t count = elements.size(), n = count ? elements[0].size() : 1 + random_below(3);
  const size_t step = odd_addresses ? 1 : kBytes[loop.dtype];
  std::vector<Array> arrays;
  std::vector<const void *> sources;
  for (size_t s = 0; s < n; ++s) {
    arrays.emplace_back(loop.dtype, count, step * random_below(130), false);
    for (size_t i = 0; i < count; ++i) arrays.back().set(i, elements[i][s]);
    sources.push_back(arrays.back().data());
  }
  arrays.emplace_back(loop.dtype, count, step * random_below(130), true);
  const bool in_place = random_below(2);
  Array &out = arrays[in_place ? random_below(n) : n];
  loop.set.of[loop.dtype][loop.op](sources.data(), static_cast<int>(n), out.data(), count, scale,
                                   stream);
  CHECK(out.guards_stand());
  for (size_t i = 0; i < count; ++i) {
    const Raw got = out.get(i), want = expected(loop.dtype, loop.op, elements[i], scale);
    if (got == want) continue;
    std::fprintf(stderr, "%s %s of %zu x %zu %s%s%s, scale %g: element %zu is %#llx, not %#llx, of",
                 loop.set.instruction_set, nlc::reduce_name(loop.op), n, count,
                 nlc::dtype_name(loop.dtype), stream ? ", streamed" : "",
                 in_place ? ", in place" : "", scale, i, static_cast<unsigned long long>(got),
                 static_cast<unsigned long long>(want));
    for (const Raw raw : elements[i]) {
      std::fprintf(stderr, " %#llx", static_cast<unsigned long long>(raw));
    }
    std::fprintf(stderr, "\n");
    std::exit(1);
  }
}

void test_random(const Loop &loop, int cases) {
  const size_t sources[] = {1, 2, 2, 3, 4, 4, 5, 8, 8, 9, 33};
  for (int i = 0; i < cases; ++i) {
    const size_t n = sources[random_below(std::size(sources))];
    const size_t count = random_below(8) ? random_below(200) : random_below(3000);
    std::vector<std::vector<Raw>> elements(count, std::vector<Raw>(n));
    const bool finite = is_float(loop.dtype) && random_below(2);
    for (auto &element : elements) {
      for (Raw &raw : element) {
        do raw = random_element(loop.dtype);
        while (finite && !is_finite(loop.dtype, raw));
      }
    }
    const double scales[] = {1, 1, 1.0 / static_cast<double>(n), 1.0 / 3, 1 + 1e-12, -0.75, 1e300};
    const double scale = is_float(loop.dtype) ? scales[random_below(std::size(scales))] : 1.0;
    run(loop, elements, scale, random_below(2), random_below(2));
  }
}

// All 16-bit values: loaded and stored unchanged, and every midpoint of two neighbours with the
// values next to it, where rounding is decided.
void test_every_16_bit_value(const nlc::Kernels &set, int dtype) {
  std::vector<std::vector<Raw>> one, neighbours;
  for (Raw raw = 0; raw <= 0xffff; ++raw) {
    one.push_back({raw});
    neighbours.push_back({raw, (raw & 0x8000) | ((raw + 1) & 0x7fff)});
  }
  run({set, dtype, NLC_SUM}, one, 1.0, false, false);
  run({set, dtype, NLC_MAX}, one, 1.0, true, false);
  const double least = std::ldexp(1.0, -20);
  for (const double scale : {0.5, 0.5 * (1 + least), 0.5 * (1 - least), 1.0 / 3, 0x1p-9, 0x1p-16}) {
    run({set, dtype, NLC_AVG}, neighbours, scale, false, false);
  }
}

// With a factor of 1/n, float32 averages equal a division by n.
void test_average_is_division() {
  for (int n = 2; n <= 64; ++n) {
    std::vector<float> values(1000), results(values.size());
    for (float &value : values) {
      value = std::ldexp(static_cast<float>(random_bits() >> 40),
                         static_cast<int>(random_below(100)) - 50);
    }
    const void *source = values.data();
    nlc::reduce(NLC_FLOAT32, NLC_AVG, &source, 1, results.data(), values.size(), 1.0 / n, false);
    for (size_t i = 0; i < values.size(); ++i)
      CHECK(results[i] == values[i] / static_cast<float>(n));
  }
}

// The calling thread's floating-point settings neither change results nor are changed.
void test_floating_point_settings() {
  std::vector<float> a(100), b(100), before(100), after(100);
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = i % 2 ? 0x1p-140f : 1.0f + static_cast<float>(i) * 0x1p-20f;
    b[i] = i % 2 ? 0x1p-141f : 0x1.8p-24f;
  }
  const void *sources[] = {a.data(), b.data()};
  nlc::reduce(NLC_FLOAT32, NLC_SUM, sources, 2, before.data(), a.size(), 1.0 / 3, false);
  CHECK(before[1] == (0x1p-140f + 0x1p-141f) / 3 && before[1] != 0);
  std::fesetround(FE_UPWARD);
#if defined(__x86_64__)
  const unsigned flush_subnormals = 0x8040;
  _mm_setcsr(_mm_getcsr() | flush_subnormals);
#endif
  nlc::reduce(NLC_FLOAT32, NLC_SUM, sources, 2, after.data(), a.size(), 1.0 / 3, false);
  CHECK(std::fegetround() == FE_UPWARD);
#if defined(__x86_64__)
  CHECK((_mm_getcsr() & flush_subnormals) == flush_subnormals);
  _mm_setcsr(_mm_getcsr() & ~flush_subnormals);
#endif
  std::fesetround(FE_TONEAREST);
  CHECK(std::memcmp(before.data(), after.data(), a.size() * sizeof(float)) == 0);
}

void test_names() {
  for (int dtype = -1; dtype <= NLC_DTYPES; ++dtype) {
    const bool known = dtype >= 0 && dtype < NLC_DTYPES;
    CHECK(nlc::element_bytes(dtype) == (known ? kBytes[dtype] : 0));
    CHECK((std::string(nlc::dtype_name(dtype)) == "unknown dtype") == !known);
    for (int op = -1; op <= NLC_REDUCES; ++op) {
      const bool named = op >= 0 && op < NLC_REDUCES;
      CHECK((std::string(nlc::reduce_name(op)) == "unknown reduction") == !named);
      const bool can = known && named && (is_float(dtype) ? op < NLC_BAND : op != NLC_AVG);
      CHECK(nlc::can_reduce(dtype, op) == can);
    }
  }
  CHECK(std::string(nlc::dtype_name(NLC_BFLOAT16)) == "bfloat16");
  CHECK(std::string(nlc::reduce_name(NLC_AVG)) == "average");
}

}  // namespace

int main(int count, char **words) {
  const int cases = count > 1 ? std::atoi(words[1]) : 60;
  test_names();
  test_average_is_division();
  test_floating_point_settings();
  for (const nlc::Kernels *set :
       {&nlc::baseline_kernels(), nlc::avx2_kernels(), nlc::avx512_kernels()}) {
    if (set == nullptr) continue;
    for (int dtype = 0; dtype < NLC_DTYPES; ++dtype) {
      for (int op = 0; op < NLC_REDUCES; ++op) {
        CHECK((set->of[dtype][op] != nullptr) == nlc::can_reduce(dtype, op));
        if (nlc::can_reduce(dtype, op)) test_random({*set, dtype, op}, cases);
      }
    }
    test_every_16_bit_value(*set, NLC_FLOAT16);
    test_every_16_bit_value(*set, NLC_BFLOAT16);
    std::printf("%s: ok\n", set->instruction_set);
  }
}
