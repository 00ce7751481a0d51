// Epilogue of the Hopper convolutions of bytes: a warpgroup's sums of 64 output channels x 128 positions become
// outputs.
#pragma once
#include "core/masked/conv_select.h"
#include "cuda/masked/conv_quantized.cuh"
#include "cuda/sm90/conv/conv_general_finish.cuh"

namespace sbnet::sm90::bytes {

using general::kPositions, general::Place;

constexpr int kRows = 64;     // output channels of a tile: rows of the product
constexpr int kQuarter = 32;  // positions staged at a time
constexpr int kPitch = 68;    // floats of a staged position: 64 channels, and no conflicts
constexpr int kStagingBytes = kQuarter * kPitch * 4;

// Element: of x and weight. kBytes: results are bytes as they leave the registers (of_registers()). Kernels have one
// form of the epilogue each: with both, registers are spilled in the loop of products.
template <class Element_, bool kBytes_>
struct Numbers {
  using Element = Element_;
  static constexpr bool kBytes = kBytes_;
  static constexpr bool kInteger = std::is_same_v<Element, int8_t>;
  using Sum = std::conditional_t<kInteger, int32_t, float>;
};

struct Epilogue {
  const float* scale;  // [K]
  float residual_scale, per_unit;
  DType y_dtype, residual_dtype;
  bool y_whole, residual_whole;  // 16 channels move in words of 16 bytes
};

inline bool whole_words(const QuantizedConv2dParams& p, const TensorView& t) {
  return p.y.size[1] % 16 == 0 && channels_vectorize(t);
}

// No residual is added, and the activation is the sign's.
inline bool of_registers(const QuantizedConv2dParams& p) {
  const bool of_sign =
      p.activation == Activation::kNone || p.activation == Activation::kRelu || p.activation == Activation::kLeakyRelu;
  return dtype_size(p.y.dtype) == 1 && whole_words(p, p.y) && !p.residual.data && of_sign;
}

inline Epilogue epilogue(const QuantizedConv2dParams& p) {
  return {p.scale,          p.residual_scale,    p.out_scale > 0 ? 1 / p.out_scale : 1,        p.y.dtype,
          p.residual.dtype, whole_words(p, p.y), p.residual.data && whole_words(p, p.residual)};
}

// Calls f(T{}) with the element type of y.
template <class C, class F>
__device__ __forceinline__ void by_result(DType dtype, const F& f) {
  if constexpr (C::kBytes)
    f(typename C::Element());
  else
    by_element<typename C::Element>(dtype, f);
}

// 16 channels of a position, of which `channels` are there, `apart` elements from one to the next; 1 if they are whole.
template <class T>
__device__ __forceinline__ void add_channels(float (&v)[16], float scale, const T* from, int64_t apart, bool whole,
                                             int channels) {
  if (whole) {
    uint4 words[sizeof(T)];
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
#pragma unroll
    for (int e = 0; e < 16; ++e) v[e] = fmaf(scale, to_float(reinterpret_cast<const T*>(words)[e]), v[e]);
  } else {
#pragma unroll
    for (int e = 0; e < 16; ++e)
      if (e < channels) v[e] = fmaf(scale, to_float(from[e * apart]), v[e]);
  }
}
template <class T>
__device__ __forceinline__ void put_channels(const float (&v)[16], T* to, int64_t apart, bool whole, int channels) {
  if (whole) {
    uint4 words[sizeof(T)];
    round_all(v, reinterpret_cast<T*>(words));
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) reinterpret_cast<uint4*>(to)[i] = words[i];
  } else {
#pragma unroll
    for (int e = 0; e < 16; ++e)
      if (e < channels) to[e * apart] = rounded<T>(v[e]);
  }
}

// Sixteen channels from k on of a position: v, scaled and with its bias, becomes outputs.
template <class C, class A>
__device__ __forceinline__ void finish_channels(const A& a, const Place& place, int k, float (&v)[16],
                                                const float* slopes) {
  const int channels = min(a.K - k, 16);
  const auto activate_all = [&] {
    if (a.activation == Activation::kRelu) {
#pragma unroll
      for (int e = 0; e < 16; ++e) v[e] = max_nan(v[e], 0.f);
    } else if (a.activation == Activation::kLeakyRelu) {
#pragma unroll
      for (int e = 0; e < 16; ++e) v[e] = v[e] > 0.f ? v[e] : v[e] * slopes[e];
    } else if (a.activation == Activation::kGelu) {  // outputs may be float32: apply_gate() is for halves
#pragma unroll
      for (int e = 0; e < 16; ++e) v[e] = 0.5f * v[e] * (1.f + erff(v[e] * 0.70710678f));
    } else if (a.activation != Activation::kNone) {
      activate(a, v);
    }
  };
  if (a.after) activate_all();
  if (a.residual.data) {
    const int64_t at = place.n * a.residual.n + (place.pixel >> 16) * a.residual.y +
                       (place.pixel & 0xffff) * a.residual.x + k * a.residual_c;
    by_element<typename C::Element>(a.residual_dtype, [&](auto t) {
      add_channels(v, a.residual_scale, static_cast<const decltype(t)*>(a.residual.data) + at, a.residual_c,
                   a.residual_whole, channels);
    });
  }
  if (!a.after) activate_all();
#pragma unroll
  for (int e = 0; e < 16; ++e) v[e] *= a.per_unit;
  by_element<typename C::Element>(a.y_dtype, [&](auto t) {
    put_channels(v, static_cast<decltype(t)*>(a.y.data) + place.y + k * a.y_c, a.y_c, a.y_whole, channels);
  });
}

// The tile's sums become outputs, a quarter of a warpgroup's positions at a time: through rows of float32 in shared
// memory, as the threads that have a position's channels are not those that should write them. One copy of the code
// runs for all quarters, whose sums are moved.
template <class C, class A>
__device__ __forceinline__ void finish_staged(const A& a, int k0, typename C::Sum (&acc)[64], uint8_t* shared,
                                              const Place* places, const float (&scale)[2], const float (&bias)[2]) {
  const int tid = threadIdx.x & 127, lane = tid & 31, wg = threadIdx.x >> 7;
  float* staged = reinterpret_cast<float*>(shared + wg * C::kStaging);
  const float* slopes = reinterpret_cast<const float*>(shared + C::kSlopesAt) + wg * C::kOutputs;
  float* mine = staged + (lane & 3) * 2 * kPitch + (tid >> 5) * 16 + (lane >> 2);
  const int position = tid >> 2, group = (tid & 3) * 16;
#pragma unroll 1
  for (int quarter = 0; quarter < 4; ++quarter, places += kQuarter) {
    if (quarter) bar_sync(1 + wg, 128);
#pragma unroll
    for (int e = 0; e < 16; ++e)
      mine[(e / 4 * 8 + e % 2) * kPitch + e / 2 % 2 * 8] =
          fmaf(static_cast<float>(acc[e]), scale[e / 2 % 2], bias[e / 2 % 2]);
#pragma unroll
    for (int e = 0; e < 48; ++e) acc[e] = acc[e + 16];
    bar_sync(1 + wg, 128);
    const Place place = places[position];
    if (place.y < 0 || k0 + group >= a.K) continue;
    float v[16];
#pragma unroll
    for (int e = 0; e < 16; e += 4) {
      const float4 four = *reinterpret_cast<const float4*>(staged + position * kPitch + group + e);
      v[e] = four.x, v[e + 1] = four.y, v[e + 2] = four.z, v[e + 3] = four.w;
    }
    finish_channels<C>(a, place, k0 + group, v, slopes + group);
  }
}

// Two channels of a position, the first in the low byte.
template <class Element>
__device__ __forceinline__ uint32_t two_bytes(float first, float second) {
  if constexpr (std::is_same_v<Element, int8_t>)
    return saturated_bytes(__float2int_rn(first), __float2int_rn(second));
  else
    return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
}

// The same where C::kBytes: y's unit is in scale and bias, and sums become bytes where they are. Channels k and k + 8
// of a position are 16 bits, which stmatrix turns; the thread that writes 16 channels puts them in order.
template <class C, class A>
__device__ __forceinline__ void finish_bytes(const A& a, int k0, typename C::Sum (&acc)[64], uint8_t* shared,
                                             const Place* places, float (&scale)[2], float (&bias)[2]) {
  using Element = typename C::Element;
  static_assert(kPositions * C::kOutputs <= C::kStaging);
  const int tid = threadIdx.x & 127, lane = tid & 31, wg = threadIdx.x >> 7;
  const float* slopes = reinterpret_cast<const float*>(shared + C::kSlopesAt) + wg * C::kOutputs;
  uint8_t* staged = shared + wg * C::kStaging;  // [position][word of 16 channels], words flipped against conflicts
  const auto word_at = [](int position, int word) {
    return position * C::kOutputs + ((word ^ position >> 1 & 3) << 4);
  };
  float slope[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    scale[h] *= a.per_unit, bias[h] *= a.per_unit;
    slope[h] = slopes[(tid >> 5) * 16 + (lane >> 2) + h * 8];
  }
  // Results take the registers of the sums, which must not be copied: there are no others.
  const auto result = [&](int e) {
    if constexpr (C::kInteger)
      return __int_as_float(acc[e]);
    else
      return acc[e];
  };
  const auto set_result = [&](int e, float v) {
    if constexpr (C::kInteger)
      acc[e] = __float_as_int(v);
    else
      acc[e] = v;
  };
#pragma unroll
  for (int e = 0; e < 64; ++e) set_result(e, fmaf(static_cast<float>(acc[e]), scale[e / 2 % 2], bias[e / 2 % 2]));
  if (a.activation == Activation::kRelu) {
#pragma unroll
    for (int e = 0; e < 64; ++e) set_result(e, max_nan(result(e), 0.f));
  } else if (a.activation == Activation::kLeakyRelu) {
#pragma unroll
    for (int e = 0; e < 64; ++e) set_result(e, result(e) > 0.f ? result(e) : result(e) * slope[e / 2 % 2]);
  }
#pragma unroll
  for (int j = 0; j < 16; j += 4) {
    uint32_t pairs[4];  // positions 8 (j + i) + 2 (lane % 4) and the next
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = 4 * (j + i);
      pairs[i] = two_bytes<Element>(result(e), result(e + 2)) | two_bytes<Element>(result(e + 1), result(e + 3)) << 16;
    }
    stmatrix_trans(smem_address(staged + word_at(8 * j + lane, tid >> 5)), pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  bar_sync(1 + wg, 128);
  const int word = tid & 3, k = k0 + word * 16;
  if (k >= a.K) return;
#pragma unroll
  for (int position = tid >> 2; position < kPositions; position += 32) {
    const int64_t to = places[position].y;
    const uint4 v = *reinterpret_cast<const uint4*>(staged + word_at(position, word));
    const uint4 ordered = {__byte_perm(v.x, v.y, 0x6420), __byte_perm(v.z, v.w, 0x6420), __byte_perm(v.x, v.y, 0x7531),
                           __byte_perm(v.z, v.w, 0x7531)};
    if (to >= 0) *reinterpret_cast<uint4*>(static_cast<uint8_t*>(a.y.data) + to + k) = ordered;
  }
}

template <class C, class A>
__device__ __forceinline__ void finish(const A& a, int k0, typename C::Sum (&acc)[64], uint8_t* shared,
                                       const Place* places, float (&scale)[2], float (&bias)[2]) {
  if constexpr (C::kBytes)
    finish_bytes<C>(a, k0, acc, shared, places, scale, bias);
  else
    finish_staged<C>(a, k0, acc, shared, places, scale, bias);
}

}  // namespace sbnet::sm90::bytes
