// What batch normalisation adds up: over a CTA's threads, then, after a barrier of the grid, over the CTAs that share
// the list, each of which does so for its own channels.
#pragma once
#include <cooperative_groups.h>

#include "cuda/masked/batch_norm_walk.cuh"

namespace sbnet {
namespace {

// A barrier of all CTAs where they share the list, with something to do while it is waited for.
template <class Meanwhile>
__device__ __forceinline__ void grid_barrier(const NormPlan& plan, const Meanwhile& meanwhile) {
  if (plan.parts == 1) {
    meanwhile();
    __syncthreads();
    return;
  }
  const auto grid = cooperative_groups::this_grid();
  auto arrived = grid.barrier_arrive();
  meanwhile();
  grid.barrier_wait(std::move(arrived));
}

// What parts of the list found of a column's channels: kNumbers of each channel, and how many pixels.
struct Found {
  float *numbers, *pixels;

  template <int kNumbers>
  __device__ __forceinline__ static Found of(const NormPlan& plan, float* workspace, int column, int channels) {
    const int64_t parts = plan.parts;
    return {workspace + column * parts * kNumbers * channels,
            workspace + plan.columns * parts * kNumbers * channels + column * parts};
  }
};

// Adds up what the warps left in shared memory, by channel: the threads below `channels` get the sums of theirs.
template <int kNumbers>
__device__ __forceinline__ void add_warps(const NormThread& thread, int channels, const double* shared,
                                          double (&sums)[kNumbers]) {
  __syncthreads();
  const int channel = static_cast<int>(threadIdx.x);
  if (channel >= channels) return;
#pragma unroll
  for (int k = 0; k < kNumbers; ++k) sums[k] = 0;
#pragma unroll 8
  for (int warp = 0; warp < thread.warps; ++warp)
#pragma unroll
    for (int k = 0; k < kNumbers; ++k) sums[k] += shared[(warp * kNumbers + k) * channels + channel];
}

// Sums over the CTA's threads, in a fixed order: number(e, k) is a thread's number k of channel e of its word.
template <int kN, int kNumbers, class Number>
__device__ __forceinline__ void add_threads(const NormThread& thread, int channels, double* shared,
                                            const Number& number, double (&sums)[kNumbers]) {
  double own[kN][kNumbers];
#pragma unroll
  for (int e = 0; e < kN; ++e)
#pragma unroll
    for (int k = 0; k < kNumbers; ++k) own[e][k] = number(e, k);
  for (int apart = 32 / thread.pixels; apart < 32; apart *= 2)
#pragma unroll
    for (int e = 0; e < kN; ++e)
#pragma unroll
      for (int k = 0; k < kNumbers; ++k) own[e][k] += __shfl_xor_sync(0xffffffffu, own[e][k], apart);
  if (thread.pixel == 0)
#pragma unroll
    for (int e = 0; e < kN; ++e)
#pragma unroll
      for (int k = 0; k < kNumbers; ++k)
        shared[(thread.warp * kNumbers + k) * channels + thread.word * kN + e] = own[e][k];
  add_warps(thread, channels, shared, sums);
}

// Sums over what the parts left in device memory: add(part, channel, to) adds what one has of a channel.
template <int kNumbers, class Add>
__device__ __forceinline__ void add_parts(const NormThread& thread, int channels, int parts, double* shared,
                                          const Add& add, double (&sums)[kNumbers]) {
  constexpr int kTogether = kNormColumn / 32;  // channels of a lane
  double own[kTogether][kNumbers] = {};
#pragma unroll 4
  for (int part = thread.warp; part < parts; part += thread.warps)
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (thread.lane + 32 * i < channels) add(part, thread.lane + 32 * i, own[i]);
#pragma unroll
  for (int i = 0; i < kTogether; ++i)
#pragma unroll
    for (int k = 0; k < kNumbers; ++k)
      if (thread.lane + 32 * i < channels)
        shared[(thread.warp * kNumbers + k) * channels + thread.lane + 32 * i] = own[i][k];
  add_warps(thread, channels, shared, sums);
}

}  // namespace
}  // namespace sbnet
