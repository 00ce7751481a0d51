// The epilogue of int8 convolutions, and how floats become int8. Included once by conv_int8.h, whose sums are
// integers, and by conv_fma.h, which sums those of depthwise layers exactly in float32.
#pragma once
#include "cpu/masked/conv_simd.h"

namespace sbnet {
namespace SBNET_ISA {

typedef int8_t ByteVec __attribute__((vector_size(kLanes)));
typedef uint32_t UnsignedVec __attribute__((vector_size(kLanes * 4)));

constexpr float kMostByte = 127.0f;

// Nearest integers, halves to even, saturated; NaN gives 0. v: at most kMostByte.
SBNET_INLINE ByteVec to_bytes(Vec v) {
#if defined(__AVX512F__)
  const __m512 x = reinterpret_cast<__m512>(v);  // below -128 both conversions saturate
  const __m512i whole = _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x);
  return reinterpret_cast<ByteVec>(_mm512_maskz_cvtsepi32_epi8(0xffff, whole));
#else
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23
  v = at_least(splat(-128.0f), v == v ? v : Vec{});
  return __builtin_convertvector(__builtin_convertvector((v + magic) - magic, IntVec), ByteVec);
#endif
}

// The same of any v.
SBNET_INLINE ByteVec saturated(Vec v) { return to_bytes(at_most(splat(kMostByte), v)); }

// Channels of one vector of a pixel, `step` elements apart.
SBNET_INLINE Vec load_channels(const float* from, int64_t step, int64_t channels) {
  if (step == 1 && channels >= kLanes) return load(from);
  Vec v = {};
  for (int64_t k = 0; k < smaller(channels, kLanes); ++k) v[k] = from[k * step];
  return v;
}
// GCC 12 takes __builtin_convertvector of bytes apart, lane by lane.
SBNET_INLINE Vec widen_bytes(ByteVec bytes) {
#if defined(__AVX512F__)
  const __m512i whole = _mm512_maskz_cvtepi8_epi32(0xffff, reinterpret_cast<__m128i>(bytes));
  return reinterpret_cast<Vec>(_mm512_maskz_cvtepi32_ps(0xffff, whole));
#elif defined(__AVX2__)
  int64_t eight;
  __builtin_memcpy(&eight, &bytes, sizeof(eight));
  return reinterpret_cast<Vec>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(eight))));
#else
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
#endif
}
SBNET_INLINE Vec load_channels(const int8_t* from, int64_t step, int64_t channels) {
  ByteVec bytes = {};
  if (step == 1 && channels >= kLanes)
    __builtin_memcpy(&bytes, from, sizeof(bytes));
  else
    for (int64_t k = 0; k < smaller(channels, kLanes); ++k) bytes[k] = from[k * step];
  return widen_bytes(bytes);
}
SBNET_INLINE void store_channels(float* to, int64_t step, int64_t channels, Vec v) {
  if (step == 1 && channels >= kLanes) return store(to, v);
  for (int64_t k = 0; k < smaller(channels, kLanes); ++k) to[k * step] = v[k];
}
SBNET_INLINE void store_channels(int8_t* to, int64_t step, int64_t channels, Vec v) {
  const ByteVec bytes = to_bytes(v);
  if (step == 1 && channels >= kLanes)
    __builtin_memcpy(to, &bytes, sizeof(bytes));
  else
    for (int64_t k = 0; k < smaller(channels, kLanes); ++k) to[k * step] = bytes[k];
}

// What a panel's epilogue multiplies, adds and bounds. Where the activation is no more than bounds, all is in units of
// the output from the start; else results become so by per_unit after it.
struct Scales {
  alignas(64) float scale[kPanelWidth], bias[kPanelWidth], slope[kPanelWidth];
  alignas(64) int32_t offset[kPanelWidth];  // of integer sums
  float residual, per_unit, low, high;
  bool bounded, after;  // after: the residual is added to what the activation gives
};

// Those of channels k0 on. offsets: of all channels, or null.
static void load_scales(const ConvPlan& plan, const int32_t* offsets, int64_t k0, int64_t channels, Scales* s) {
  const QuantizedConv2dParams& q = *plan.quantized;
  const float per_unit = q.y.dtype == DType::kI8 ? 1 / q.out_scale : 1.0f;
  __builtin_memset(s, 0, sizeof(*s));
  __builtin_memcpy(s->scale, q.scale + k0, channels * 4);
  if (q.bias) __builtin_memcpy(s->bias, static_cast<const float*>(q.bias) + k0, channels * 4);
  if (q.slope)
    __builtin_memcpy(s->slope, static_cast<const float*>(q.slope) + k0, channels * 4);
  else
    for (int64_t k = 0; k < kPanelWidth; ++k) s->slope[k] = q.activation_param;
  if (offsets) __builtin_memcpy(s->offset, offsets + k0, channels * 4);
  s->after = adds_after(q);
  s->bounded = !s->after && bounds_of(q.activation, &s->low, &s->high);
  s->residual = q.residual_scale;
  s->per_unit = per_unit;
  if (s->bounded) {
    for (int64_t k = 0; k < channels; ++k) s->scale[k] *= per_unit, s->bias[k] *= per_unit;
    s->residual *= per_unit;
    s->high *= per_unit;
  } else {
    s->low = -__builtin_inff();
    s->high = __builtin_inff();
  }
  if (q.y.dtype == DType::kI8 && s->high > kMostByte) s->high = kMostByte;
}

SBNET_INLINE Vec sum_of(const float* sums, const int32_t*) { return load(sums); }
SBNET_INLINE Vec sum_of(const int32_t* sums, const int32_t* offsets) {
  UnsignedVec sum, offset;  // either may have wrapped around; what they come to has not
  __builtin_memcpy(&sum, sums, sizeof(sum));
  __builtin_memcpy(&offset, offsets, sizeof(offset));
  return __builtin_convertvector(reinterpret_cast<IntVec>(sum + offset), Vec);
}

// kWhole: whole vectors of neighbouring channels, in residual and y too.
template <bool kWhole, class Y, class Sum>
SBNET_INLINE void finish_rows(const ConvPlan& plan, const Scales& s, const ConvPixels& px, int64_t begin, int64_t end,
                              int64_t k0, int64_t channels, const Sum* sums) {
  const Conv2dParams& p = plan.p;
  const int64_t step = kWhole ? 1 : p.y.stride[1], residual_step = kWhole ? 1 : p.residual.stride[1];
  const bool floats = p.residual.dtype == DType::kF32, bounded = s.bounded;
  const Vec low = splat(s.low), high = splat(s.high);
  const void* residual = p.residual.data;
  Y* const out = static_cast<Y*>(p.y.data);
  for (int64_t i = begin; i < end; ++i, sums += kPanelWidth)
    for (int64_t v = 0; v < channels; v += kLanes) {
      const int64_t left = kWhole ? kLanes : channels - v;
      Vec y = sum_of(sums + v, s.offset + v) * load(s.scale + v) + load(s.bias + v);
      if (s.after) y = activate(p.activation, load(s.slope + v), y);
      if (residual) {
        const int64_t at = px.residual[i] + (k0 + v) * residual_step;
        y += s.residual * (floats ? load_channels(static_cast<const float*>(residual) + at, residual_step, left)
                                  : load_channels(static_cast<const int8_t*>(residual) + at, residual_step, left));
      }
      if (!bounded) {
        if (!s.after) y = activate(p.activation, load(s.slope + v), y);
        y *= s.per_unit;
      }
      store_channels(out + px.y[i] + (k0 + v) * step, step, left, at_most(high, at_least(low, y)));
    }
}

// Y: of the output.
template <class Y, class Sum>
static __attribute__((noinline)) void finish_quantized(const ConvPlan& plan, const Scales& s, const ConvPixels& px,
                                                       int64_t begin, int64_t end, int64_t k0, int64_t channels,
                                                       const Sum* sums) {
  const TensorView &y = plan.p.y, &residual = plan.p.residual;
  if (channels % kLanes == 0 && y.stride[1] == 1 && (!residual.data || residual.stride[1] == 1))
    finish_rows<true, Y>(plan, s, px, begin, end, k0, channels, sums);
  else
    finish_rows<false, Y>(plan, s, px, begin, end, k0, channels, sums);
}

}  // namespace SBNET_ISA
}  // namespace sbnet
