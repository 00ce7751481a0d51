// The general Hopper convolution: sums that CTAs of a cluster exchange whose shares are of one tile.
#pragma once
#include "cuda/sm90/conv/conv_general_plan.cuh"

namespace sbnet::sm90::general {

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
