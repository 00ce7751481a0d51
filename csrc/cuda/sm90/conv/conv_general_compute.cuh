// The general Hopper convolution: the consumers, the kernel and its launch.
#pragma once
#include "cuda/sm90/conv/conv_general_finish.cuh"
#include "cuda/sm90/conv/conv_general_host.cuh"
#include "cuda/sm90/conv/conv_general_load.cuh"

namespace sbnet::sm90::general {

// Warps 0-7.
template <class C>
__device__ void consume(const Args& a, uint32_t smem, uint8_t* shared) {
  using T = typename C::T;
  const int tid = threadIdx.x & 127, lane = tid & 31;
  const int wg = __shfl_sync(0xffffffff, threadIdx.x >> 7, 0);
  Place* places = reinterpret_cast<Place*>(shared + C::kPlacesAt) + wg * kPositions;
  const bool by_hand = a.x_word || a.w_word;  // written by threads, not by TMA
  float* bias = reinterpret_cast<float*>(shared + C::kBiasAt) + wg * C::kOutputs;
  const uint32_t weights = wgmma_operand(smem + C::kWeightsAt);
  const uint32_t patches = wgmma_operand(smem + C::kWeightsAt + a.weight_stages * C::kTap) + wg * a.second * 8;
  const uint64_t rows_of_weights = wgmma_layout(1024), rows_of_pixels = wgmma_layout(a.group_stride * 128);
  take_turn();
  // While the first patch is on its way.
  clear_fringe<T>(a.zeros, a.zeros_plan, int64_t{blockIdx.x} * 256 + threadIdx.x, int64_t{gridDim.x} * 256);
  const uint32_t tiles = tiles_of(a, min(max(load_int(a.count), 0), a.capacity));

  uint32_t patch = 0, patch_phase = 0, weight = 0, weight_phase = 0;
  for (uint32_t tile = blockIdx.x, made = 0; tile < tiles; tile += gridDim.x, ++made) {
    uint32_t first_unit, column_index;
    a.columns.divmod(tile, &first_unit, &column_index);
    const Column column(a, column_index);
    const int k0 = column.chunk_k + column.k * C::kOutputs;
    mbar_wait(smem + C::kPatchFull + 8 * patch, patch_phase);
    bar_sync(1 + wg, 128);  // the places of the tile before are no longer read
    places[tid] = place_of(
        a, reinterpret_cast<const int4*>(shared + C::kRecordsAt) + made % kMaxPatchStages * kMaxUnits, wg, tid);
    const float own_bias =
        tid < C::kOutputs ? load_bias<T>(a, k0 + tid) : 0.f;  // on its way until the products are done

    float acc[C::kChannelRows ? 1 : 2][C::kChannelRows ? 64 : C::kOutputs / 2];  // the first tap overwrites it
    int accumulate = 0;
    uint32_t read_weight = 0,
             read_patch = 0;  // barriers of the stages that the tap before the last one issued has read
    auto release = [&] {
      if (lane == 0 && read_weight) mbar_arrive(read_weight);
      if (lane == 0 && read_patch) mbar_arrive(read_patch);
      read_weight = read_patch = 0;
    };
    // Not a branch around single products: the compiler would then close a group of them at each, and wait for it.
    auto multiply_slice = [&](auto count) {
      constexpr int kSteps = decltype(count)::value;
      int tap = 0;
#pragma unroll 1
      for (int g = 0; g < a.groups; ++g) {
        mbar_wait(smem + C::kPatchFull + 8 * patch, patch_phase);
        const uint32_t pixels = patches + patch * (a.patch_bytes >> 4);
#pragma unroll 1
        for (const int end = a.group[g].end; tap < end;) {
          const uint32_t dp = pixels + a.tap[tap].shift * 8, dw = weights + weight * (C::kTap >> 4);
          mbar_wait(smem + C::kWeightFull + 8 * weight, weight_phase);
          if (by_hand) fence_async_proxy();
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < kSteps; ++k) {
            const uint64_t w = rows_of_weights | (dw + k * 2), x = rows_of_pixels | (dp + k * 2);
            if constexpr (C::kChannelRows) {
              wgmma<T, 128>(acc[0], w, x, accumulate | k);
            } else {
              wgmma<T, C::kOutputs>(acc[0], x, w, accumulate | k);
              wgmma<T, C::kOutputs>(acc[1], x + a.group_stride * 64, w, accumulate | k);
            }
          }
          wgmma_commit();
          wgmma_wait<1>();
          release();
          accumulate = 1;
          read_weight = smem + C::kWeightEmpty + 8 * weight;
          read_patch = ++tap == end ? smem + C::kPatchEmpty + 8 * patch : 0;
          if (++weight == a.weight_stages) weight = 0, weight_phase ^= 1;
        }
        if (++patch == a.patch_stages) patch = 0, patch_phase ^= 1;
        if (a.patch_stages == 1) {  // the next patch comes where this one is
          wgmma_wait<0>();
          release();
        }
      }
    };
    if constexpr (C::kListed) {
      int own;
#pragma unroll 1
      do {
        mbar_wait(smem + C::kPatchFull + 8 * patch, patch_phase);
        own = __shfl_sync(0xffffffff, reinterpret_cast<const int*>(shared + C::kStepsAt)[patch], 0);
        with_steps(own & ~kLastSlice, multiply_slice);
      } while (!(own & kLastSlice));
    } else {
#pragma unroll 1
      for (int slice = 0; slice < a.slices; ++slice) with_steps(slice_of<C>(a, slice).steps, multiply_slice);
    }
    if (tid < C::kOutputs) bias[tid] = own_bias;
    wgmma_wait<0>();
    release();
    bar_sync(1 + wg, 128);
    finish<C>(a, column, k0, acc, smem, shared, places, bias);
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, C::kCtas)
    conv_general_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  run_roles<C>(maps, a, shared, [&](uint32_t smem) { consume<C>(a, smem, shared); });
}

// ---------------------------------------------------------------- host

template <class C>
Status launch(const Conv2dParams& p, Args& a, const DeviceInfo& device, cudaStream_t stream) {
  return launch_cut<C, conv_general_kernel<C>>(p, a, device, stream);
}

}  // namespace sbnet::sm90::general
