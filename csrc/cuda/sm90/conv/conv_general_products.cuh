// The general Hopper convolution: products of the consumers, patch by patch and tap by tap, and sums that CTAs of a
// cluster exchange whose shares are of one tile.
#pragma once
#include <type_traits>

#include "cuda/sm90/conv/conv_general_finish.cuh"
#include "cuda/sm90/conv/conv_general_plan.cuh"

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

// Each CTA finishes some of the tile: of two, 64 positions of either warpgroup; of four, of one. It sends the others
// its sums of what they finish, and its own become those of all parts: in acc's first half, always added in the same
// order. Returns which of this warpgroup's two times 64 positions they are, from one to the end; none: (0, 0). All
// threads of a warpgroup, once in a launch, when this warpgroup has read all of its patches and weights: sums come in
// their place.
template <class C, class Acc>
__device__ __forceinline__ int2 exchange_sums(const Args& a, const Share& share, uint32_t smem, Acc& acc) {
  constexpr int kEach = C::kOutputs / 2;
  auto sum = [&](int half, int e) -> float& { return C::kChannelRows ? acc[0][half * 32 + e] : acc[half][e]; };
  const int tid = threadIdx.x & 127, wg = __shfl_sync(0xffffffff, threadIdx.x >> 7, 0);
  const bool two = share.log == 1;
  const uint32_t full = smem + C::kSumsFull, at = smem + C::kWeightsAt + tid * 16, first = cluster_rank() - share.part;
  cluster_wait();  // the barriers of the others are ready
  if (threadIdx.x == 0) mbar_expect(full, (two ? 2 : 3) * C::kSums);
  // Nobody writes before all have read. The barrier counts as if all of the cluster shared the tile.
  if (tid < 1 << a.log_cluster) mbar_arrive_at(smem + C::kSumsReady, first + (tid & ((1 << share.log) - 1)));
  mbar_wait(smem + C::kSumsReady, 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int owner = two ? half : wg * 2 + half;
    if (owner == share.part) continue;
    const int slot = two ? wg : share.part - (share.part > owner);
    const uint32_t to = map_to_rank(at + slot * C::kSums, first + owner), bar = map_to_rank(full, first + owner);
#pragma unroll
    for (int e = 0; e < kEach; e += 4)
      store_async(to + e * 512, bar, sum(half, e), sum(half, e + 1), sum(half, e + 2), sum(half, e + 3));
  }
  const int mine = two ? share.part : share.part - wg * 2;
  if (mine != 0 && mine != 1) return make_int2(0, 0);
  if (mine == 1) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) sum(0, e) = sum(1, e);
  }
  mbar_wait(full, 0);
  const int end = two ? wg + 1 : 3;
#pragma unroll 1
  for (int slot = two ? wg : 0; slot < end; ++slot) {
#pragma unroll
    for (int e = 0; e < kEach; e += 4) {
      const float4 more = load_shared(at + slot * C::kSums + e * 512);
      sum(0, e) += more.x, sum(0, e + 1) += more.y, sum(0, e + 2) += more.z, sum(0, e + 3) += more.w;
    }
  }
  return make_int2(mine, mine + 1);
}

}  // namespace sbnet::sm90::general
