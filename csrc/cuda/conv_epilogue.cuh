// What every convolution kernel does after its sums: bias, residual, activation, store; and the fringe's zeros.
#pragma once
#include "core/conv.h"
#include "cuda/common.cuh"

namespace sbnet {

// Elements of T in a 16-byte access.
template <class T>
constexpr int kLanes = 16 / sizeof(T);

template <int kRows, int kN, class F>
__device__ __forceinline__ void each(float (&v)[kRows][kN], F f) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int e = 0; e < kN; ++e) v[i][e] = f(v[i][e]);
}
// max and min that pass NaN on.
__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float min_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
// The switch stays outside the loop: one for many values.
template <int kRows, int kN>
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
      return each(v, [](float x) { return x / (1.f + expf(-x)); });
    case Activation::kGelu:
      return each(v, [](float x) { return 0.5f * x * (1.f + erff(x * 0.70710678118654752f)); });
    case Activation::kHardswish:
      return each(v, [](float x) { return x * min_nan(max_nan(x + 3.f, 0.f), 6.f) * (1.f / 6.f); });
  }
}

template <class T>
__device__ __forceinline__ float bias_at(const Conv2dParams& p, int64_t k) {
  if (!p.bias) return 0.f;
  return p.bias_dtype == DType::kF32 ? static_cast<const float*>(p.bias)[k]
                                     : to_float(static_cast<const T*>(p.bias)[k]);
}

// May kLanes channels of `t`, the first a multiple of kLanes, be read or written as one 16-byte word?
inline bool channels_vectorize(const TensorView& t) {
  const int64_t lanes = 16 / dtype_size(t.dtype);
  if (t.stride[1] != 1 || reinterpret_cast<uintptr_t>(t.data) % 16) return false;
  for (int d : {0, 2, 3})
    if (t.size[d] > 1 && t.stride[d] % lanes) return false;
  return true;
}

// Where a pixel's channels begin in y and residual, in elements; y < 0: nowhere.
struct alignas(16) Output {
  int64_t y, residual;
};

// y[pixel, k ... k+kN) = act(v + residual) for kRows pixels, as far as channel k_end. kN is a multiple of kLanes<T>.
// Several pixels at once, so that their loads are under way together. A thread reads its residual before it writes y:
// the two may be one tensor.
template <class T, int kRows, int kN>
__device__ __forceinline__ void finish_outputs(const Conv2dParams& p, bool vector_y, bool vector_residual,
                                               float (&v)[kRows][kN], const Output (&to)[kRows], int64_t k,
                                               int64_t k_end) {
  constexpr int kL = kLanes<T>, kWords = kN / kL;
  const bool whole = k + kN <= k_end && k % kL == 0;
  if (p.residual.data) {
    const T* residual = static_cast<const T*>(p.residual.data) + k * p.residual.stride[1];
    if (vector_residual && whole) {
      uint4 words[kRows][kWords];
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          words[i][w] = uint4{0, 0, 0, 0};
          if (to[i].y >= 0) words[i][w] = reinterpret_cast<const uint4*>(residual + to[i].residual)[w];
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
  activate(p.activation, p.activation_param, v);
  T* y = static_cast<T*>(p.y.data) + k * p.y.stride[1];
  if (vector_y && whole) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        uint4 word;
        T* part = reinterpret_cast<T*>(&word);
#pragma unroll
        for (int e = 0; e < kL; ++e) part[e] = from_float<T>(v[i][w * kL + e]);
        if (to[i].y >= 0) reinterpret_cast<uint4*>(y + to[i].y)[w] = word;
      }
  } else {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int e = 0; e < kN; ++e)
        if (to[i].y >= 0 && k + e < k_end) y[to[i].y + e * p.y.stride[1]] = from_float<T>(v[i][e]);
  }
}

// How a launch spreads the fringe: 2^log2_threads neighbouring threads clear one pixel.
struct FringePlan {
  FastDiv height, width;
  int log2_threads = 0;
  bool vector = false;  // whole 16-byte words of channels

  FringePlan() = default;
  explicit FringePlan(const Conv2dParams& p) : height(p.y.size[2]), width(p.y.size[3]) {
    const int64_t lanes = 16 / dtype_size(p.y.dtype);
    vector = channels_vectorize(p.y) && p.y.size[1] % lanes == 0;
    const int64_t stores = vector ? p.y.size[1] / lanes : p.y.size[1];
    while (log2_threads < 5 && (1 << log2_threads) < stores) ++log2_threads;
  }
  // Threads that the whole list could use.
  int64_t threads(const Conv2dParams& p) const { return p.fringe.pixels ? p.fringe.capacity << log2_threads : 0; }
};

// Clears this thread's share of the fringe; `thread` of `threads` counts over the whole grid. No pixel of the fringe is
// an active one, so the order against the tiles does not matter.
template <class T>
__device__ __forceinline__ void clear_fringe(const Conv2dParams& p, const FringePlan& plan, int64_t thread,
                                             int64_t threads) {
  if (!p.fringe.pixels) return;
  const int64_t count = min(static_cast<int64_t>(max(*p.fringe.count, 0)), p.fringe.capacity);
  const int64_t plane_pixels = p.y.size[0] * p.y.size[2] * p.y.size[3];
  const int lane = static_cast<int>(thread) & ((1 << plan.log2_threads) - 1);
  for (int64_t i = thread >> plan.log2_threads; i < count; i += threads >> plan.log2_threads) {
    const int32_t pixel = p.fringe.pixels[i];
    if (pixel < 0 || pixel >= plane_pixels) continue;
    uint32_t n, row, column;
    plan.width.divmod(pixel, &row, &column);
    plan.height.divmod(row, &n, &row);
    T* y = static_cast<T*>(p.y.data) + n * p.y.stride[0] + row * p.y.stride[2] + column * p.y.stride[3];
    if (plan.vector) {
      for (int64_t k = lane * kLanes<T>; k < p.y.size[1]; k += kLanes<T> << plan.log2_threads)
        *reinterpret_cast<uint4*>(y + k) = uint4{0, 0, 0, 0};
    } else {
      for (int64_t k = lane; k < p.y.size[1]; k += 1 << plan.log2_threads) y[k * p.y.stride[1]] = from_float<T>(0.f);
    }
  }
}

}  // namespace sbnet
