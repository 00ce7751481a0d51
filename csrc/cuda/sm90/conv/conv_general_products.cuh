// The general Hopper convolution: products of the consumers, patch by patch and tap by tap.
#pragma once
#include <type_traits>

#include "cuda/sm90/conv/conv_general_finish.cuh"

namespace sbnet::sm90::general {

template <class T, int N, int kSums>
__device__ __forceinline__ void multiply_step(float (&d)[kSums], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, float>)
    wgmma_tf32<N>(d, a, b, accumulate);
  else
    wgmma<T, N>(d, a, b, accumulate);
}

// What a warp of consumers knows of the rings of patches and weights.
template <class C>
struct Products {
  const Args& a;
  const uint32_t smem;
  const int lane = threadIdx.x & 31, wg = __shfl_sync(0xffffffff, threadIdx.x >> 7, 0);
  const bool by_hand = a.x_word || a.w_word;  // written by threads, not by TMA
  const uint32_t weights = wgmma_operand(smem + C::kWeightsAt);
  const uint32_t patches = wgmma_operand(smem + C::kWeightsAt + a.weight_stages * C::kTap) + wg * a.second * 8;
  const uint64_t rows_of_weights = wgmma_layout(1024), rows_of_pixels = wgmma_layout(a.group_stride * 128);
  uint32_t weight_phase = 0, weight = 0, patch_phase = 0, patch = 0;
  uint32_t read_weight, read_patch;  // barriers of the stages that the tap before the last one issued has read
  int accumulate;                    // 0: the next product overwrites the sums

  __device__ __forceinline__ Products(const Args& a, uint32_t smem) : a(a), smem(smem) {}

  __device__ __forceinline__ void wait_for_patch() const { mbar_wait(smem + C::kPatchFull + 8 * patch, patch_phase); }
  __device__ __forceinline__ void begin() { accumulate = 0, read_weight = read_patch = 0; }
  __device__ __forceinline__ void release() {
    if (lane == 0 && read_weight) mbar_arrive(read_weight);
    if (lane == 0 && read_patch) mbar_arrive(read_patch);
    read_weight = read_patch = 0;
  }
  __device__ __forceinline__ void finish() {
    wgmma_wait<0>();
    release();
  }

  // A slice of input channels, of 32 bytes times `steps`: multiply(weights, pixels, accumulate) for each of its
  // products. Taps that share a patch are handed to in_runs(tap, end, multiply_taps), which calls multiply_taps(stop)
  // until tap is end. steps is a constant, not a branch around single products: the compiler would then close a group
  // of them at each, and wait for it.
  template <class Steps, class Multiply, class InRuns>
  __device__ __forceinline__ void slice(Steps, const Multiply& multiply, const InRuns& in_runs) {
    int tap = 0;
#pragma unroll 1
    for (int g = 0; g < a.groups; ++g) {
      wait_for_patch();
      const uint32_t pixels = patches + patch * (a.patch_bytes >> 4);
      const int end = a.group[g].end;
      const auto multiply_taps = [&](int stop) {
#pragma unroll 1
        while (tap < stop) {
          const uint32_t dp = pixels + a.tap[tap].shift * 8, dw = weights + weight * (C::kTap >> 4);
          mbar_wait(smem + C::kWeightFull + 8 * weight, weight_phase);
          if (by_hand) fence_async_proxy();
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < Steps::value; ++k)
            multiply(rows_of_weights | (dw + k * 2), rows_of_pixels | (dp + k * 2), accumulate | k);
          wgmma_commit();
          wgmma_wait<1>();
          release();
          accumulate = 1;
          read_weight = smem + C::kWeightEmpty + 8 * weight;
          read_patch = ++tap == end ? smem + C::kPatchEmpty + 8 * patch : 0;
          if (++weight == a.weight_stages) weight = 0, weight_phase ^= 1;
        }
      };
      in_runs(tap, end, multiply_taps);
      if (++patch == a.patch_stages) patch = 0, patch_phase ^= 1;
      if (a.patch_stages == 1) finish();  // the next patch comes where this one is
    }
  }
};

}  // namespace sbnet::sm90::general
