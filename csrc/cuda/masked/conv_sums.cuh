// The epilogue of kernels whose lanes hold eight neighbouring output channels of a pixel: bias, residual, activation
// and store, straight from the registers of mma.sync. Each step is taken for all sums at once: as many small epilogues
// as a lane has pixels (finish_outputs()) are the same instructions, but of seven activations each, and what runs then
// lies too far apart for the instruction cache.
#pragma once
#include "cuda/masked/conv_portable.cuh"

namespace sbnet::portable {

// Where a lane's eight channels of products are: column n of tile j is channel 8 (n/2) + 2 j + n%2 of a group of 32, so
// that lane l has channels 8 (l%4) and on, of rows l/4 and, h = 1, l/4 + 8.
template <class Sum, int kM, int kTiles>
__device__ __forceinline__ Sum& sum_at(Sum (&sums)[kM][kTiles][4], int m, int h, int group, int e) {
  return sums[m][group * 4 + e / 2][h * 2 + e % 2];
}

// sums += the residual's channels k0 + 32 group ... + 8. to(m, h): an Output.
template <class T, int kM, int kTiles, class To>
__device__ __forceinline__ void add_residual(const Conv2dParams& p, float (&sums)[kM][kTiles][4], const To& to, int k0,
                                             int k_end) {
  constexpr int kWords = 8 / kLanes<T>, kTogether = 2 / kWords;  // pixels that the registers left have room for
#pragma unroll
  for (int group = 0; group < kTiles / 4; ++group) {
    const int k = k0 + group * 32;
    if (k >= k_end) continue;
    const T* residual = static_cast<const T*>(p.residual.data) + k;
#pragma unroll
    for (int i = 0; i < 2 * kM; i += kTogether) {  // row i / 2, half i % 2
      uint4 words[kTogether][kWords];
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const Output at = to((i + n) / 2, (i + n) % 2);
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          words[n][w] = uint4{};
          if (at.y >= 0) words[n][w] = reinterpret_cast<const uint4*>(residual + at.residual)[w];
        }
      }
#pragma unroll
      for (int n = 0; n < kTogether; ++n)
#pragma unroll
        for (int e = 0; e < 8; ++e)
          sum_at(sums, (i + n) / 2, (i + n) % 2, group, e) +=
              to_float(reinterpret_cast<const T*>(&words[n][e / kLanes<T>])[e % kLanes<T>]);
    }
  }
}

// y = act(sums + bias + residual), or act(sums + bias) + residual, for channels below k_end, a multiple of 8. y and
// residual are in 16-byte words of channels.
template <class T, int kM, int kTiles, class To>
__device__ __forceinline__ void finish_sums(const Conv2dParams& p, float (&sums)[kM][kTiles][4], const To& to, int k0,
                                            int k_end) {
  constexpr int kWords = 8 / kLanes<T>;
#pragma unroll
  for (int group = 0; group < kTiles / 4; ++group) {
    const int k = k0 + group * 32;
    if (k >= k_end || !p.bias) continue;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float bias = bias_at<T>(p, k + e);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) sum_at(sums, m, h, group, e) += bias;
    }
  }
  const bool after = adds_after(p);
  if (p.residual.data && !after) add_residual<T>(p, sums, to, k0, k_end);
  if (!p.slope) {
    activate<sizeof(T) == 2>(p.activation, p.activation_param, reinterpret_cast<float (&)[kM][kTiles * 4]>(sums));
  } else {
#pragma unroll
    for (int group = 0; group < kTiles / 4; ++group)
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int k = k0 + group * 32 + e;
        const float slope = k < k_end ? number_at<T>(p.slope, p.slope_dtype, k) : 0.f;
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& v = sum_at(sums, m, h, group, e);
            v = v > 0.f ? v : v * slope;
          }
      }
  }
  if (after) add_residual<T>(p, sums, to, k0, k_end);
#pragma unroll
  for (int group = 0; group < kTiles / 4; ++group) {
    const int k = k0 + group * 32;
    if (k >= k_end) continue;
    T* y = static_cast<T*>(p.y.data) + k;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Output at = to(m, h);
        uint4 words[kWords];
#pragma unroll
        for (int e = 0; e < 8; ++e)
          reinterpret_cast<T*>(&words[e / kLanes<T>])[e % kLanes<T>] = from_float<T>(sum_at(sums, m, h, group, e));
#pragma unroll
        for (int w = 0; w < kWords; ++w)
          if (at.y >= 0) reinterpret_cast<uint4*>(y + at.y)[w] = words[w];
      }
  }
}

}  // namespace sbnet::portable
