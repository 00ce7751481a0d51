// 3x3 convolutions of stride 1 by patches (conv_patch.cuh): which units a list is cut into.
//
// A kernel has units of three sizes, and the count in device memory says how many of each: whole waves of large ones,
// then what is left in those that end first. Large units have the fewest copies for a product; small ones busy more
// multiprocessors.
#pragma once
#include "cuda/masked/conv_patch.cuh"

namespace sbnet::portable {

namespace {

//                         cell, rows, outputs, warps down and across, split, ahead
using Large8 = PatchShape<16, 16, 128, 4, 2, 1, 1>;  // 256 pixels by 128 channels, eight warps of 64 by 64
using Small8 = PatchShape<16, 8, 64, 2, 2, 2, 2>;    // 128 by 64, the reduction shared by two sets of four warps
using Tiny8 = PatchShape<16, 4, 64, 2, 2, 2, 4>;     // 64 by 64, likewise
using Large4 = PatchShape<16, 16, 64, 4, 1, 1, 1>;   // 256 by 64, four warps of 64 by 64
using Small4 = PatchShape<16, 8, 64, 2, 2, 1, 2>;    // 128 by 64, four of 64 by 32
using Tiny4 = PatchShape<16, 4, 64, 2, 2, 1, 2>;     // 64 by 64, four of 32 by 32
using Pairs4 = PatchShape<8, 16, 64, 4, 1, 1, 1>;    // four cells of 8x8 by 64, four warps of 64 by 64
using Pair4 = PatchShape<8, 8, 64, 2, 2, 1, 2>;      // two cells by 64, four of 64 by 32
using Half4 = PatchShape<8, 8, 32, 2, 1, 2, 4>;      // two cells by 32, the reduction shared by two sets of two warps
// Of up to 32 output channels and one chunk of input channels, whose weights stay.
using Large2 = PatchShape<16, 16, 32, 4, 1, 1, 1, true>;  // 256 by 32, four warps of 64 by 32
using Small2 = PatchShape<16, 8, 32, 4, 1, 1, 1, true>;   // 128 by 32
using Pairs2 = PatchShape<8, 16, 32, 4, 1, 1, 1, true>;   // four cells of 8x8 by 32
using Pair2 = PatchShape<8, 8, 32, 4, 1, 1, 1, true>;     // two cells by 32

// Sizes of units, how many CTAs of a kernel a multiprocessor holds, and what units cost where one of the largest costs
// 64: as measured with one in every CTA, and of multiprocessors with a single one.
template <class L, class S, class U, int kCtas_, int kAloneL, int kCostS, int kAloneS, int kCostU, int kAloneU>
struct PatchMix {
  using Large = L;
  using Small = S;
  using Tiny = U;
  static constexpr int kCtas = kCtas_;
  static constexpr int kThreads = L::kThreads;
  static constexpr int kShared = std::max(L::kShared, std::max(S::kShared, U::kShared));
  static_assert(S::kThreads == kThreads && U::kThreads == kThreads, "");

  static __device__ __forceinline__ int large(int64_t units, int ctas) {
    return cost_of<kCtas, 64, kAloneL>(units, ctas);
  }
  static __device__ __forceinline__ int small(int64_t units, int ctas) {
    return cost_of<kCtas, kCostS, kAloneS>(units, ctas);
  }
  static __device__ __forceinline__ int tiny(int64_t units, int ctas) {
    return cost_of<kCtas, kCostU, kAloneU>(units, ctas);
  }
};
using Wide = PatchMix<Large8, Small8, Tiny8, 1, 64, 24, 24, 18, 18>;
using Narrow = PatchMix<Large4, Small4, Tiny4, 2, 38, 35, 22, 25, 16>;
using Pairs = PatchMix<Pairs4, Pair4, Pair4, 2, 37, 35, 21, 35, 21>;
using DeepPairs = PatchMix<Pairs4, Pair4, Half4, 2, 37, 35, 21, 22, 13>;
using Few = PatchMix<Large2, Small2, Small2, 3, 30, 36, 20, 36, 20>;
using FewPairs = PatchMix<Pairs2, Pair2, Pair2, 2, 37, 36, 21, 36, 21>;

template <class T, class Mix, bool kTail>
__global__ void __launch_bounds__(Mix::kThreads, Mix::kCtas)
    conv_patch_kernel(const __grid_constant__ ParamsOf<T> p, const __grid_constant__ PatchPlan plan) {
  using Large = typename Mix::Large;
  using Small = typename Mix::Small;
  using Tiny = typename Mix::Tiny;
  extern __shared__ __align__(128) char smem[];
  grid_dependency_wait();
  clear_fringe_of<T>(p, plan.fringe, int64_t{blockIdx.x} * Mix::kThreads + threadIdx.x,
                     int64_t{gridDim.x} * Mix::kThreads);

  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const int cells = count * static_cast<int>(plan.cells_per_block.divisor), K = static_cast<int>(p.weight.size[0]);
  const int ctas = static_cast<int>(gridDim.x);
  // Cells in whole waves of large units.
  const int large_units = static_cast<int>(Large::units(cells, K));
  int large = min(large_units / ctas * ctas / (Large::channel_tiles(K) * Large::kParts) * Large::kPatches, cells);
  const int rest = cells - large;
  const int in_small = Mix::small(Small::units(rest, K), ctas), in_tiny = Mix::tiny(Tiny::units(rest, K), ctas);
  if (rest > 0 && Mix::large(Large::units(rest, K), ctas) <= min(in_small, in_tiny)) large = cells;
  // Else CTAs of the next kernel would take what multiprocessors this list leaves idle, two each, and wait there.
  if (Mix::kCtas == 1 || Large::units(large, K) >= ctas) grid_dependency_release();
  if (large > 0) PatchUnits<T, Large, kTail>(p, plan, smem, 0, large).run();
  if (large >= cells) return;
  if (std::is_same_v<Small, Tiny> || in_small <= in_tiny)
    PatchUnits<T, Small, kTail>(p, plan, smem, large, cells - large).run();
  else
    PatchUnits<T, Tiny, kTail>(p, plan, smem, large, cells - large).run();
}

template <class T, class Mix, bool kTail>
Status launch_mix(const ParamsOf<T>& p, const DeviceInfo& device, cudaStream_t stream) {
  static OccupancyCache cache;
  using Tiny = typename Mix::Tiny;
  const PatchPlan plan(p, Tiny::kCell);
  constexpr auto kernel = conv_patch_kernel<T, Mix, kTail>;
  int ctas = 0;
  SBNET_TRY(prepare_kernel(device, kernel, Mix::kThreads, Mix::kShared, &cache, &ctas));
  const int64_t cells = p.active.capacity * plan.cells_per_block.divisor;
  const unsigned grid = persistent_grid(device, ctas, Tiny::units(cells, static_cast<int>(p.weight.size[0])),
                                        plan.fringe.threads(p), Mix::kThreads);
  SBNET_CUDA_TRY(kConvOp,
                 launch_dependent(device, kernel, dim3(grid), dim3(Mix::kThreads), Mix::kShared, stream, p, plan));
  return ok_status();
}
// Without a tail, code of its own where it pays.
template <class T, class Mix>
Status launch_mix(const ParamsOf<T>& p, const DeviceInfo& device, cudaStream_t stream) {
  if constexpr (sizeof(T) > 1 && !Mix::Large::kKeeps)
    if (p.x.size[1] % (4 * kLanes<T>) == 0) return launch_mix<T, Mix, false>(p, device, stream);
  return launch_mix<T, Mix, true>(p, device, stream);
}

// Eight warps of large tiles want a long reduction and 128 output channels. Below so many input channels all units sum
// in the same order, and a block's bits do not depend on the others in the list.
constexpr int kLeastWideInputs = 192, kLeastWideOutputs = 96, kLeastDeepInputs = 128, kMostFewOutputs = 32;

template <class T>
Status launch_units(const ParamsOf<T>& p, const DeviceInfo& device, cudaStream_t stream) {
  const bool pairs = p.active.grid.size[0] % 16 || p.active.grid.size[1] % 16;
  if (p.weight.size[0] <= kMostFewOutputs && p.x.size[1] <= 4 * kLanes<T>)
    return pairs ? launch_mix<T, FewPairs>(p, device, stream) : launch_mix<T, Few>(p, device, stream);
  if (pairs) {
    if constexpr (sizeof(T) > 1)  // sums of bytes are the same in any order
      if (p.x.size[1] < kLeastDeepInputs) return launch_mix<T, Pairs>(p, device, stream);
    return launch_mix<T, DeepPairs>(p, device, stream);
  }
  return p.x.size[1] >= kLeastWideInputs && p.weight.size[0] >= kLeastWideOutputs
             ? launch_mix<T, Wide>(p, device, stream)
             : launch_mix<T, Narrow>(p, device, stream);
}

}  // namespace

// Of floats.
template <class T>
Status launch_patch(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return launch_units<T>(p, device, stream);
}

}  // namespace sbnet::portable
