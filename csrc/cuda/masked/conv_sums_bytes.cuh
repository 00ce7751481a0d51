// The epilogue of conv_sums.cuh for int8: sums of int32, and residual and result of any of four types.
#pragma once
#include "cuda/masked/conv_quantized.cuh"
#include "cuda/masked/conv_sums.cuh"

namespace sbnet::portable {

// T: of x. y may have another type, where x is of bytes.
template <class T, class Params>
__device__ __forceinline__ void clear_fringe_of(const Params& p, const FringePlan& plan, int64_t thread,
                                                int64_t threads) {
  if constexpr (sizeof(T) == 1)
    by_element<T>(p.y.dtype, [&](auto y) { clear_fringe<decltype(y)>(p, plan, thread, threads); });
  else
    clear_fringe<T>(p, plan, thread, threads);
}

// v += scale * the residual's channels k0 + 32 group ... + 8, as far as k_end. kElements: eight may be no words of
// memory; words says whether they are.
template <class R, bool kElements, int kM, int kTiles, class To>
__device__ __forceinline__ void add_residual_of(const QuantizedConv2dParams& p, bool words, float (&v)[kM][kTiles][4],
                                                const To& to, int k0, int k_end) {
  constexpr int kTogether = sizeof(R) == 1 ? 4 : 2;  // pixels that the registers left have room for
#pragma unroll
  for (int group = 0; group < kTiles / 4; ++group) {
    const int k = k0 + group * 32;
    if (k >= k_end) continue;
    const bool whole = !kElements || (words & (k + 8 <= k_end));
    const R* residual = static_cast<const R*>(p.residual.data) + k * p.residual.stride[1];
#pragma unroll
    for (int i = 0; i < 2 * kM; i += kTogether) {  // row i / 2, half i % 2
      Pack<R, 8> added[kTogether];
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const Output at = to((i + n) / 2, (i + n) % 2);
        added[n] = {};
        if (at.y < 0) continue;
        if (whole) {
          added[n] = *reinterpret_cast<const Pack<R, 8>*>(residual + at.residual);
        } else {
#pragma unroll
          for (int e = 0; e < 8; ++e)
            if (k + e < k_end) added[n].v[e] = residual[at.residual + e * p.residual.stride[1]];
        }
      }
#pragma unroll
      for (int n = 0; n < kTogether; ++n)
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float& sum = sum_at(v, (i + n) / 2, (i + n) % 2, group, e);
          sum = fmaf(p.residual_scale, to_float(added[n].v[e]), sum);
        }
    }
  }
}

template <class Y, bool kElements, int kM, int kTiles, class To>
__device__ __forceinline__ void store_as(const QuantizedConv2dParams& p, bool words, float (&v)[kM][kTiles][4],
                                         const To& to, int k0, int k_end) {
  const float per_unit = sizeof(Y) == 1 ? 1 / p.out_scale : 1.f;
#pragma unroll
  for (int group = 0; group < kTiles / 4; ++group) {
    const int k = k0 + group * 32;
    if (k >= k_end) continue;
    const bool whole = !kElements || (words & (k + 8 <= k_end));
    Y* y = static_cast<Y*>(p.y.data) + k * p.y.stride[1];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Output at = to(m, h);
        Pack<Y, 8> result;
        float eight[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float sum = sum_at(v, m, h, group, e);
          eight[e] = sizeof(Y) == 1 ? sum * per_unit : sum;
        }
        round_all(eight, result.v);
        if (at.y < 0) continue;
        if (whole) {
          *reinterpret_cast<Pack<Y, 8>*>(y + at.y) = result;
        } else {
#pragma unroll
          for (int e = 0; e < 8; ++e)
            if (k + e < k_end) y[at.y + e * p.y.stride[1]] = result.v[e];
        }
      }
  }
}

// y = act(scale sums + bias + residual), or act(scale sums + bias) + residual, for channels below k_end.
template <class T, bool kElements = false, int kM, int kTiles, class To>
__device__ __forceinline__ void finish_sums(const QuantizedConv2dParams& p, int32_t (&sums)[kM][kTiles][4],
                                            const To& to, int k0, int k_end) {
  float v[kM][kTiles][4];
  const float* const biases = static_cast<const float*>(p.bias);
#pragma unroll
  for (int group = 0; group < kTiles / 4; ++group)
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int k = k0 + group * 32 + e;
      const float scale = k < k_end ? p.scale[k] : 0.f, bias = biases && k < k_end ? biases[k] : 0.f;
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          sum_at(v, m, h, group, e) = fmaf(static_cast<float>(sum_at(sums, m, h, group, e)), scale, bias);
    }
  const bool after = adds_after(p);
  const auto add_residual = [&] {
    by_element<int8_t>(p.residual.dtype, [&](auto r) {
      add_residual_of<decltype(r), kElements>(p, eights_are_words(p.residual), v, to, k0, k_end);
    });
  };
  if (p.residual.data && !after) add_residual();
  if (p.slope) {
    const float* const slopes = static_cast<const float*>(p.slope);
#pragma unroll
    for (int group = 0; group < kTiles / 4; ++group)
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int k = k0 + group * 32 + e;
        const float slope = k < k_end ? slopes[k] : 0.f;
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& sum = sum_at(v, m, h, group, e);
            sum = sum > 0.f ? sum : sum * slope;
          }
      }
  } else if (p.y.dtype == DType::kF32) {
    activate(p.activation, p.activation_param, reinterpret_cast<float (&)[kM][kTiles * 4]>(v));
  } else {
    activate<true>(p.activation, p.activation_param, reinterpret_cast<float (&)[kM][kTiles * 4]>(v));
  }
  if (p.residual.data && after) add_residual();
  by_element<int8_t>(p.y.dtype,
                     [&](auto y) { store_as<decltype(y), kElements>(p, eights_are_words(p.y), v, to, k0, k_end); });
}

}  // namespace sbnet::portable
