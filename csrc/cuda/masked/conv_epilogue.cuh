// What every convolution kernel does after its sums: bias, residual, activation, store.
#pragma once
#include <type_traits>

#include "core/masked/conv.h"
#include "cuda/gelu.cuh"
#include "cuda/masked/layer.cuh"

namespace sbnet {

template <int kRows, int kN, class F>
__device__ __forceinline__ void each(float (&v)[kRows][kN], F f) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int e = 0; e < kN; ++e) v[i][e] = f(v[i][e]);
}
// The switch stays outside the loop: one for many values. kShort: of results that are rounded to 16 bits.
template <bool kShort = false, int kRows, int kN>
__device__ __forceinline__ void activate(Activation activation, float param, float (&v)[kRows][kN]) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return each(v, [](float x) { return max_nan(x, 0.f); });
    case Activation::kRelu6:
      return each(v, [](float x) { return min_nan(max_nan(x, 0.f), 6.f); });
    case Activation::kLeakyRelu:
      return each(v, [=](float x) { return x < 0.f ? x * param : x; });
    case Activation::kSilu:
      return each(v, [](float x) { return kShort ? silu_short(x) : x / (1.f + expf(-x)); });
    case Activation::kGelu:
      return each(v,
                  [](float x) { return kShort ? gelu_short(x) : 0.5f * x * (1.f + erff(x * 0.70710678118654752f)); });
    case Activation::kHardswish:
      return each(v, [](float x) { return x * min_nan(max_nan(x + 3.f, 0.f), 6.f) * (1.f / 6.f); });
  }
}

// One of [K] numbers of T or float.
template <class T>
__device__ __forceinline__ float number_at(const void* numbers, DType dtype, int64_t k) {
  return dtype == DType::kF32 ? static_cast<const float*>(numbers)[k] : to_float(static_cast<const T*>(numbers)[k]);
}
template <class T>
__device__ __forceinline__ float bias_at(const Conv2dParams& p, int64_t k) {
  return p.bias ? number_at<T>(p.bias, p.bias_dtype, k) : 0.f;
}

// The activation of a convolution, of channels k ... k+kN as far as k_end: where they have slopes, each its own.
template <class T, class Params, int kRows, int kN>
__device__ __forceinline__ void activate_channels(const Params& p, float (&v)[kRows][kN], int64_t k, int64_t k_end) {
  if (!p.slope) return activate<sizeof(T) == 2>(p.activation, p.activation_param, v);
#pragma unroll
  for (int e = 0; e < kN; ++e) {
    const float slope = k + e < k_end ? number_at<T>(p.slope, p.slope_dtype, k + e) : 0.f;
#pragma unroll
    for (int i = 0; i < kRows; ++i) v[i][e] = v[i][e] > 0.f ? v[i][e] : v[i][e] * slope;
  }
}

// Where a pixel's channels begin in y and residual, in elements; y < 0: nowhere.
struct alignas(16) Output {
  int64_t y, residual;
};

// y[pixel, k ... k+kN) = act(v + residual), or act(v) + residual where adds_after(), for kRows pixels, as far as
// channel k_end. kN is a multiple of kLanes<T>, or half of it. Several pixels at once, so that their loads are under
// way together. A thread reads its residual before it writes y: the two may be one tensor.
template <class T, int kRows, int kN>
__device__ __forceinline__ void finish_outputs(const Conv2dParams& p, bool vector_y, bool vector_residual,
                                               float (&v)[kRows][kN], const Output (&to)[kRows], int64_t k,
                                               int64_t k_end) {
  using Bytes = std::conditional_t<(kN < kLanes<T>), uint2, uint4>;
  constexpr int kL = sizeof(Bytes) / sizeof(T), kWords = kN / kL;
  const bool whole = k + kN <= k_end && k % kL == 0, after = adds_after(p);
  if (after) activate_channels<T>(p, v, k, k_end);
  if (p.residual.data) {
    const T* residual = static_cast<const T*>(p.residual.data) + k * p.residual.stride[1];
    if (vector_residual && whole) {
      Bytes words[kRows][kWords];
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          words[i][w] = Bytes{};
          if (to[i].y >= 0) words[i][w] = reinterpret_cast<const Bytes*>(residual + to[i].residual)[w];
        }
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int e = 0; e < kN; ++e) v[i][e] += to_float(reinterpret_cast<const T*>(&words[i][e / kL])[e % kL]);
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int e = 0; e < kN; ++e)
          if (to[i].y >= 0 && k + e < k_end) v[i][e] += to_float(residual[to[i].residual + e * p.residual.stride[1]]);
    }
  }
  if (!after) activate_channels<T>(p, v, k, k_end);
  T* y = static_cast<T*>(p.y.data) + k * p.y.stride[1];
  if (vector_y && whole) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        Bytes word;
        T* part = reinterpret_cast<T*>(&word);
#pragma unroll
        for (int e = 0; e < kL; ++e) part[e] = from_float<T>(v[i][w * kL + e]);
        if (to[i].y >= 0) reinterpret_cast<Bytes*>(y + to[i].y)[w] = word;
      }
  } else {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int e = 0; e < kN; ++e)
        if (to[i].y >= 0 && k + e < k_end) y[to[i].y + e * p.y.stride[1]] = from_float<T>(v[i][e]);
  }
}

}  // namespace sbnet
