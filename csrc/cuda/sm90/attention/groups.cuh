// What the attention kernels' CTAs begin with: a group of warpgroups for each tile that a CTA works on at once.
#pragma once
#include "cuda/sm90/attention/ptx.cuh"

namespace sbnet::sm90::attention {

// Warps below C::kGroups of the first warpgroup produce, one for each group; all others consume. `Shared` lays out a
// group's shared memory, init(shared) starts the barriers that the stages' are not.
template <class C, class Shared, class Init, class Consume, class Produce>
__device__ __forceinline__ void run_groups(uint8_t* memory, const Init& init, const Consume& consume,
                                           const Produce& produce) {
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), consumer = (warp >> 2) - 1;
  const int group = warp < 4 ? warp : consumer / C::kWarpgroups;
  const Shared s(memory, group);
  if (warp < C::kGroups && (threadIdx.x & 31) == 0) {
    init(s);
    for (int i = 0; i < C::kStages; ++i) mbar_init(s.full + 8 * i, 1), mbar_init(s.empty + 8 * i, 4 * C::kWarpgroups);
    fence_mbar_init();
  }
  __syncthreads();
  grid_dependency_release();
  grid_dependency_wait();
  if (warp >= 4) {
    registers_up<C::kRegisters>();
    consume(s, group, consumer);
  } else {
    registers_down<C::kProducerRegisters>();
    if (warp < C::kGroups) produce(s);
  }
}

}  // namespace sbnet::sm90::attention
