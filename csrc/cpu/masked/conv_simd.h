// Vectors, 16-bit conversions and activations of the CPU convolution; pooling uses the first two. Included once by each
// conv_<isa>.cpp and pool_<isa>.cpp, which defines SBNET_ISA (a namespace), SBNET_LANES and SBNET_VECTORS first; see
// isa.h for why.
#pragma once
#include "core/by_dtype.h"
#include "cpu/masked/conv_kernels.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define SBNET_INLINE static inline __attribute__((always_inline))

namespace sbnet {
namespace SBNET_ISA {

constexpr int kLanes = SBNET_LANES;
constexpr int kVectors = SBNET_VECTORS;  // per panel
constexpr int kPanelWidth = kLanes * kVectors;

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef float UnalignedVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

SBNET_INLINE Vec load(const float* at) { return *reinterpret_cast<const UnalignedVec*>(at); }
SBNET_INLINE void store(float* at, Vec v) { *reinterpret_cast<UnalignedVec*>(at) = v; }

// The first `count` lanes alone: what lies behind them is not touched. The other lanes of what is loaded are zeros.
#if defined(__AVX512F__) && SBNET_LANES == 16
SBNET_INLINE __mmask16 first_of(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
SBNET_INLINE Vec load_part(const float* at, int64_t count) {
  return reinterpret_cast<Vec>(_mm512_maskz_loadu_ps(first_of(count), at));
}
SBNET_INLINE void store_part(float* at, Vec v, int64_t count) {
  _mm512_mask_storeu_ps(at, first_of(count), reinterpret_cast<__m512>(v));
}
#else
SBNET_INLINE Vec load_part(const float* at, int64_t count) {
  Vec v = Vec{};
  for (int64_t i = 0; i < count; ++i) v[i] = at[i];
  return v;
}
SBNET_INLINE void store_part(float* at, Vec v, int64_t count) {
  for (int64_t i = 0; i < count; ++i) at[i] = v[i];
}
#endif
SBNET_INLINE Vec load_some(const float* at, int64_t count) { return count == kLanes ? load(at) : load_part(at, count); }
SBNET_INLINE void store_some(float* at, Vec v, int64_t count) {
  if (count == kLanes)
    store(at, v);
  else
    store_part(at, v, count);
}
SBNET_INLINE Vec splat(float f) { return f - Vec{}; }  // not f + 0: that would lose the sign of -0

// The lanes of v in another order.
SBNET_INLINE Vec permute(Vec v, IntVec order) {
#if defined(__AVX512F__) && SBNET_LANES == 16
  // The form that keeps all lanes by a mask: of the one without, GCC 12 says that it reads what is not initialized.
  return reinterpret_cast<Vec>(
      _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(order), reinterpret_cast<__m512>(v)));
#elif defined(__AVX2__) && SBNET_LANES == 8
  return reinterpret_cast<Vec>(_mm256_permutevar8x32_ps(reinterpret_cast<__m256>(v), reinterpret_cast<__m256i>(order)));
#else
  Vec found;
  for (int i = 0; i < kLanes; ++i) found[i] = v[order[i]];
  return found;
#endif
}

SBNET_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
SBNET_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// ---- 16-bit elements; arithmetic is float32 throughout.
struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

SBNET_INLINE float from_bits(uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
SBNET_INLINE uint32_t to_bits(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  return u;
}

SBNET_INLINE float widen(float f) { return f; }
SBNET_INLINE float widen(int8_t b) { return b; }
SBNET_INLINE float widen(BFloat b) { return from_bits(uint32_t{b.bits} << 16); }
SBNET_INLINE float widen(Half h) {
  const uint32_t sign = (h.bits & 0x8000u) << 16, rest = (h.bits & 0x7fffu) << 13;
  if ((h.bits & 0x7c00u) == 0x7c00u) return from_bits(sign | 0x7f800000u | rest);
  return from_bits(sign | to_bits(from_bits(rest) * 0x1p112f));  // the product also normalises subnormals
}

SBNET_INLINE void narrow(float* to, float f) { *to = f; }
SBNET_INLINE void narrow(BFloat* to, float f) {
  const uint32_t u = to_bits(f), rounded = u + 0x7fffu + ((u >> 16) & 1u);
  to->bits = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u | (u >> 16) : rounded >> 16);
}
SBNET_INLINE void narrow(Half* to, float f) {
  const uint32_t u = to_bits(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  uint32_t h;
  if (a >= 0x47800000u)  // 65536 and above: infinity, or NaN
    h = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
  else if (a < 0x38800000u)  // subnormal: adding 0.5 shifts and rounds the mantissa
    h = to_bits(from_bits(a) + 0.5f) - 0x3f000000u;
  else
    h = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  to->bits = static_cast<uint16_t>(sign | h);
}

// Eight neighbours at once: short enough for the chunks of a patch.
template <class T>
SBNET_INLINE void widen8(float* to, const T* from) {
  for (int i = 0; i < 8; ++i) to[i] = widen(from[i]);
}
template <class T>
SBNET_INLINE void narrow8(T* to, const float* from) {
  for (int i = 0; i < 8; ++i) narrow(to + i, from[i]);
}
SBNET_INLINE void widen8(float* to, const float* from) { __builtin_memcpy(to, from, 32); }
SBNET_INLINE void narrow8(float* to, const float* from) { __builtin_memcpy(to, from, 32); }
#if defined(__F16C__)
SBNET_INLINE void widen8(float* to, const Half* from) {
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
SBNET_INLINE void narrow8(Half* to, const float* from) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}
#endif
#if defined(__AVX2__)
SBNET_INLINE void narrow8(BFloat* to, const float* from) {
  const __m256i u = _mm256_castps_si256(_mm256_loadu_ps(from)), high = _mm256_srli_epi32(u, 16);
  const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(high, _mm256_set1_epi32(1)));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, half), 16);
  const __m256i magnitude = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
  const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  const __m256i bits = _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x7fc0)), nan);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
}
#endif

template <class T>
SBNET_INLINE void load_row(float* to, const T* from, int64_t stride, int64_t count) {
  int64_t i = 0;
  if (stride == 1)
    for (; i + 8 <= count; i += 8) widen8(to + i, from + i);
  for (; i < count; ++i) to[i] = widen(from[i * stride]);
}
template <class T>
SBNET_INLINE void store_row(T* to, int64_t stride, const float* from, int64_t count) {
  int64_t i = 0;
  if (stride == 1)
    for (; i + 8 <= count; i += 8) narrow8(to + i, from + i);
  for (; i < count; ++i) narrow(to + i * stride, from[i]);
}

// ---- Activations. Comparisons are written so that NaN takes the branch that keeps it.

// Coefficients of both functions: tests/tools/fit_polynomials.py.

// exp to about 1 ulp: 2^n times a polynomial on [-ln2/2, ln2/2]; infinity above 88.7, about 1e-38 below -87.
SBNET_INLINE Vec exponential(Vec x) {
  const Vec low = splat(-87.0f), high = splat(88.0f), magic = splat(12582912.0f);  // 1.5 * 2^23: rounds to integers
  Vec c = x < low ? low : x;
  c = c > high ? high : c;
  const Vec shifted = c * 1.44269504f + magic, n = shifted - magic;
  const Vec r = (c - n * 0.693359375f) - n * -2.12194440e-4f;  // ln2 = 355/512 - 2.12e-4: n times the first is exact
  Vec e = splat(1.97903530e-4f);
  e = e * r + 1.39446487e-3f;
  e = e * r + 8.33349675e-3f;
  e = e * r + 4.16662954e-2f;
  e = e * r + 1.66666657e-1f;
  e = e * r + 5.00000000e-1f;
  e = e * (r * r) + r + 1.0f;
  const IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  e *= reinterpret_cast<Vec>(exponent);
  return x > splat(88.7f) ? splat(__builtin_inff()) : e;
}

// erf to about 1 ulp: x + x p(x^2) up to 1, 1 - exp(t q(t) - t) beyond.
SBNET_INLINE Vec error_function(Vec x) {
  Vec t = x < 0.0f ? -x : x;
  t = t > 4.0f ? splat(4.0f) : t;  // erf rounds to 1 from 3.92 on
  Vec far = splat(-3.55706243e-6f);
  far = far * t + 2.84360685e-5f;
  far = far * t + 1.38746022e-4f;
  far = far * t - 3.18200514e-3f;
  far = far * t + 2.30916254e-2f;
  far = far * t - 1.05669044e-1f;
  far = far * t - 6.35410130e-1f;
  far = far * t - 1.28599584e-1f;
  far = 1.0f - exponential(far * t - t);
  const Vec s = t * t;
  Vec near = splat(7.85387310e-5f);
  near = near * s - 8.01019778e-4f;
  near = near * s + 5.18832821e-3f;
  near = near * s - 2.68538129e-2f;
  near = near * s + 1.12835854e-1f;
  near = near * s - 3.76126260e-1f;
  near = near * s + 1.28379166e-1f;
  near = near * t + t;
  const Vec e = t > 1.0f ? far : near;
  return x < 0.0f ? -e : e;
}

// The larger, and the smaller, of a bound and v: v where it is NaN, or a zero that equals the bound.
#if defined(__AVX512F__) && SBNET_LANES == 16
SBNET_INLINE Vec at_least(Vec low, Vec v) { return reinterpret_cast<Vec>(_mm512_maskz_max_ps(0xffff, low, v)); }
SBNET_INLINE Vec at_most(Vec high, Vec v) { return reinterpret_cast<Vec>(_mm512_maskz_min_ps(0xffff, high, v)); }
#elif defined(__AVX2__) && SBNET_LANES == 8
SBNET_INLINE Vec at_least(Vec low, Vec v) { return reinterpret_cast<Vec>(_mm256_max_ps(low, v)); }
SBNET_INLINE Vec at_most(Vec high, Vec v) { return reinterpret_cast<Vec>(_mm256_min_ps(high, v)); }
#else
SBNET_INLINE Vec at_least(Vec low, Vec v) { return v < low ? low : v; }
SBNET_INLINE Vec at_most(Vec high, Vec v) { return v > high ? high : v; }
#endif

// Is it no more than bounds?
SBNET_INLINE bool bounds_of(Activation activation, float* low, float* high) {
  *low = activation == Activation::kNone ? -__builtin_inff() : 0.0f;
  *high = activation == Activation::kRelu6 ? 6.0f : __builtin_inff();
  return activation == Activation::kNone || activation == Activation::kRelu || activation == Activation::kRelu6;
}

// slope: of leaky_relu.
SBNET_INLINE Vec activate(Activation activation, Vec slope, Vec v) {
  const Vec zero = Vec{};
  switch (activation) {
    case Activation::kNone:
      return v;
    case Activation::kRelu:
      return v < zero ? zero : v;
    case Activation::kRelu6:
      v = v < zero ? zero : v;
      return v > 6.0f ? splat(6.0f) : v;
    case Activation::kLeakyRelu:
      return v > zero ? v : v * slope;
    case Activation::kSilu:
      return v / (1.0f + exponential(-v));
    case Activation::kGelu:
      return 0.5f * v * (1.0f + error_function(v * 0.70710678f));
    case Activation::kHardswish: {
      Vec gate = v + 3.0f;
      gate = gate < zero ? zero : gate;
      gate = gate > 6.0f ? splat(6.0f) : gate;
      return v * gate / 6.0f;
    }
  }
  return v;
}
SBNET_INLINE Vec activate(Activation activation, float slope, Vec v) { return activate(activation, splat(slope), v); }

}  // namespace SBNET_ISA
}  // namespace sbnet
