// Sums over the threads of a CTA, in their order.
#pragma once
#include "cuda/common.cuh"

namespace sbnet {

// The sum of `mine` over the threads before this one; *all: over all of kThreads. `sums`: kThreads / 32 of shared
// memory, free again once the caller has synchronised. Every thread calls.
template <int kThreads>
__device__ int sum_before(int mine, int* sums, int* all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int at = sum - mine;
  *all = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) at += sums[w];
    *all += sums[w];
  }
  return at;
}

}  // namespace sbnet
