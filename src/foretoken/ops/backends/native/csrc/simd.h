// Vectors of floats, one register wide, in the compiler's vector extension, for AVX-512, AVX2 and NEON.
// Never compiled with -ffast-math, so that NaN and infinities keep their meaning.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace foretoken {
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntVec __attribute__((vector_size(kWidth * 4)));
typedef uint32_t BitVec __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kWidth * 2)));

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

inline Vec splat(float x) { return x - Vec{}; }  // 0 + x would turn -0 into 0

// b if either is NaN. Compilers turn `a > b ? a : b` into two operations if one side is a constant.
inline Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

inline Vec min(Vec a, Vec b) { return a < b ? a : b; }

inline bool any(IntVec mask) {
  uint64_t part[kWidth / 2], all = 0;
  std::memcpy(part, &mask, sizeof mask);
  for (uint64_t bits : part) all |= bits;
  return all;
}

// Upper halves of the products with `m`. Intrinsics: without them a uniform takes 2.1 ns, not 0.8.
inline BitVec multiply_high(BitVec v, uint32_t m) {
#if defined(__AVX512F__)
  const __m512i by = _mm512_set1_epi32(static_cast<int>(m)), a = (__m512i)v;
  const __m512i even = _mm512_mul_epu32(a, by), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), by);
  return (BitVec)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
#elif defined(__AVX2__)
  const __m256i by = _mm256_set1_epi32(static_cast<int>(m)), a = (__m256i)v;
  const __m256i even = _mm256_mul_epu32(a, by), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), by);
  return (BitVec)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
#else
  BitVec high;
  for (int i = 0; i < kWidth; i++) high[i] = static_cast<uint32_t>(uint64_t{v[i]} * m >> 32);
  return high;
#endif
}

// One operation, where compilers would widen each half and join the two.
inline BitVec widen(HalfVec h) {
#if defined(__AVX512F__)
  return (BitVec)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
  return (BitVec)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, BitVec);
#endif
}

inline Vec from_bfloat16(HalfVec h) { return (Vec)(widen(h) << 16); }
inline Vec from_float16(HalfVec h) {
  const BitVec bits = widen(h), sign = (bits & 0x8000u) << 16;
  const BitVec rest = (bits & 0x7fffu) << 13;
  const Vec scaled = (Vec)rest * 5.192296858534828e33f;  // 2^112: the exponent's new bias
  const IntVec special = (IntVec)rest >= 0x0f800000;     // infinity or NaN
  return (Vec)(sign | (special ? rest | 0x7f800000u : (BitVec)scaled));
}

// `from_float16` by the processor's own operation, where it has one.
inline Vec from_halves(HalfVec h) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h);
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps((__m128i)h);
#else
  return from_float16(h);
#endif
}

// a * b + c, rounded once if the processor can.
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline float max_lane(Vec v) {
  float best = v[0];
  for (int i = 1; i < kWidth; i++) best = v[i] > best ? v[i] : best;
  return best;
}

// The sum in a fixed order: the upper half is added to the lower half, repeatedly.
inline float sum_lanes(Vec v) {
  float lane[kWidth];
  store(lane, v);
  for (int half = kWidth / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] += lane[i + half];
  return lane[0];
}

// The polynomial sum x^n + next x^(n - 1) + ...
inline Vec horner(Vec, Vec sum) { return sum; }
template <typename... Rest>
Vec horner(Vec x, Vec sum, float next, Rest... rest) {
  return horner(x, sum * x + next, rest...);
}

// e^x to about 1 ulp for x in [-87, 88]; 0 below, clamped above; -inf gives 0, NaN gives NaN.
inline Vec exp(Vec x) {
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec bounded = min(max(x, splat(-87.33f)), splat(88.0f));
  Vec n = (bounded * 1.44269504f + magic) - magic;
  Vec r = bounded - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec p = horner(r, splat(1.9875691500e-4f), 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                 1.6666665459e-1f, 5.0000001201e-1f);
  p = p * r * r + r + 1.0f;
  IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  Vec result = p * (Vec)exponent;
  result = x < splat(-87.33f) ? Vec{} : result;
  return x != x ? x : result;
}

// Natural logarithm to about 1 ulp for positive normal numbers; -inf at 0, NaN below it.
inline Vec log(Vec x) {
  const IntVec bits = (IntVec)x;
  IntVec exponent = ((bits >> 23) & 255) - 126;
  Vec m = (Vec)((bits & 0x007fffff) | 0x3f000000);  // mantissa in [0.5, 1)
  const IntVec small = m < splat(0.70710678f);
  exponent += small;  // -1 where true
  m = (small ? m + m : m) - 1.0f;
  const Vec e = __builtin_convertvector(exponent, Vec), z = m * m;
  const Vec p = horner(m, splat(7.0376836292e-2f), -1.1514610310e-1f, 1.1676998740e-1f,
                       -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f,
                       -2.4999993993e-1f, 3.3333331174e-1f);
  Vec y = p * m * z + e * -2.12194440e-4f - 0.5f * z;
  y = m + y + e * 0.693359375f;
  y = x == Vec{} ? splat(kMinusInfinity) : y;
  return (x < Vec{}) | (x != x) ? splat(__builtin_nanf("")) : y;
}

// log(1 - u) for u in (0, 1), with a small relative error also for u near 0.
inline Vec log1m(Vec u) {
  const Vec w = 1.0f - u;
  return w == splat(1.0f) ? -u : log(w) * (u / (1.0f - w));
}

// Adding this to a number rounds it to an integer n; the low bits of the sum are the exponent of 2^n.
constexpr float kRounding = 12583039.0f;  // 1.5 * 2^23 + 127

// 2^t = scale (1 + excess) for t <= 0, at least 2^-126; NaN for NaN. The error is 2e-9 before rounding.
struct PowerOfTwo {
  Vec scale, excess;

  explicit PowerOfTwo(Vec t) {
    t = max(splat(-126.0f), t);
    const Vec n = t + kRounding, f = t - (n - kRounding);
    const Vec p = horner(f, splat(1.5353361956775188e-4f), 1.3398875016719103e-3f,
                         9.61843691766262e-3f, 5.5503323674201965e-2f, 2.4022647738456726e-1f,
                         6.931471824645996e-1f);
    scale = (Vec)((IntVec)n << 23);
    excess = p * f;
  }
};

// 2^t for t <= 0, at least 2^-126.
inline Vec exp2_of(Vec t) {
  const PowerOfTwo y(t);
  return y.scale + y.scale * y.excess;
}

// 1 - 2^t for t <= 0, with a small relative error also for t near 0.
inline Vec one_minus_exp2(Vec t) {
  const PowerOfTwo y(t);
  return (1.0f - y.scale) - y.scale * y.excess;
}

constexpr float kLog2e = 1.44269504f;
}  // namespace foretoken
