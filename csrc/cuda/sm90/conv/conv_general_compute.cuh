// The general Hopper convolution: the consumers, the kernel and its launch.
#pragma once
#include "cuda/sm90/conv/conv_general_finish.cuh"
#include "cuda/sm90/conv/conv_general_host.cuh"
#include "cuda/sm90/conv/conv_general_load.cuh"
#include "cuda/sm90/conv/conv_general_products.cuh"

namespace sbnet::sm90::general {

// Warps 0-7.
template <class C>
__device__ void consume(const Args& a, uint32_t smem, uint8_t* shared) {
  using T = typename C::T;
  const int tid = threadIdx.x & 127;
  Products<C> products(a, smem);
  const int wg = products.wg;
  Place* places = reinterpret_cast<Place*>(shared + C::kPlacesAt) + wg * kPositions;
  float* bias = reinterpret_cast<float*>(shared + C::kBiasAt) + wg * C::kOutputs;
  take_turn();
  // While the first patch is on its way.
  clear_fringe<T>(a.zeros, a.zeros_plan, int64_t{blockIdx.x} * 256 + threadIdx.x, int64_t{gridDim.x} * 256);
  const uint32_t tiles = tiles_of(a, count_of<C>(a));

  for (uint32_t base = 0, made = 0; base < tiles; base += gridDim.x, ++made) {
    const TileShare at(a, base, tiles);
    if (at.tile >= tiles) break;
    const Column column(a, at.column);
    const int k0 = column.chunk_k + column.k * C::kOutputs;
    products.wait_for_patch();
    bar_sync(1 + wg, 128);  // the places of the tile before are no longer read
    places[tid] = place_of(
        a, reinterpret_cast<const int4*>(shared + C::kRecordsAt) + made % kMaxPatchStages * kMaxUnits, wg, tid);
    const float own_bias =
        tid < C::kOutputs ? load_bias<HalfOf<T>>(a, k0 + tid) : 0.f;  // on its way until the products are done

    float acc[C::kChannelRows ? 1 : 2][C::kChannelRows ? 64 : C::kOutputs / 2];  // the first tap overwrites it
    products.begin();
    const auto multiply = [&](uint64_t w, uint64_t x, int accumulate) {
      if constexpr (C::kChannelRows) {
        multiply_step<T, 128>(acc[0], w, x, accumulate);
      } else {
        multiply_step<T, C::kOutputs>(acc[0], x, w, accumulate);
        multiply_step<T, C::kOutputs>(acc[1], x + a.group_stride * 64, w, accumulate);
      }
    };
    const auto multiply_slice = [&](auto steps) {
      products.slice(steps, multiply, [](int&, int end, const auto& multiply_taps) { multiply_taps(end); });
    };
    if constexpr (C::kListed) {
      int own;
#pragma unroll 1
      do {
        products.wait_for_patch();
        own = __shfl_sync(0xffffffff, reinterpret_cast<const int*>(shared + C::kStepsAt)[products.patch], 0);
        with_steps(own & ~kLastSlice, multiply_slice);
      } while (!(own & kLastSlice));
    } else {
      const int2 slices = at.of(slices_of<C>(a, at.column));
#pragma unroll 1
      for (int slice = slices.x; slice < slices.y; ++slice) with_steps(slice_of<C>(a, slice).steps, multiply_slice);
    }
    if (tid < C::kOutputs) bias[tid] = own_bias;
    products.finish();
    bar_sync(1 + wg, 128);
    int2 halves = make_int2(0, 2);
    if constexpr (!C::kListed) {
      if (at.log) halves = exchange_sums<C>(a, at, smem, acc);
    }
    if constexpr (C::kFloats)
      finish_floats<C>(a, column, k0, acc, shared, places, bias, halves);
    else
      finish<C>(a, column, k0, acc, smem, shared, places, bias, halves);
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
