// Products with block-sparse weights in plain float32 arithmetic: what the threads of a CTA make of the stages that
// they have put into shared memory.
#pragma once
#include "cuda/common.cuh"

namespace sbnet::portable {

// Adds a stage's products to those of rows row0 + i * kRowStep and columns column0 + k.
template <int kRowStep, int kDepth, int kRows, int kCols, int kTall, int kWide>
__device__ __forceinline__ void multiply_stage(const float (&left)[kDepth][kRows], const float (&right)[kDepth][kCols],
                                               int row0, int column0, float (&run)[kTall][kWide]) {
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    float w[kWide];
#pragma unroll
    for (int k = 0; k < kWide; ++k) w[k] = right[d][column0 + k];
#pragma unroll
    for (int i = 0; i < kTall; ++i) {
      const float v = left[d][row0 + i * kRowStep];
#pragma unroll
      for (int k = 0; k < kWide; ++k) run[i][k] = fmaf(v, w[k], run[i][k]);
    }
  }
}

// Adds a run's sums to the whole ones; the next run begins.
template <int kTall, int kWide>
__device__ __forceinline__ void end_run(float (&sum)[kTall][kWide], float (&run)[kTall][kWide]) {
#pragma unroll
  for (int i = 0; i < kTall; ++i)
#pragma unroll
    for (int k = 0; k < kWide; ++k) {
      sum[i][k] += run[i][k];
      run[i][k] = 0.f;
    }
}

// Adds the rows' products to elements threadIdx.x, threadIdx.x + kThreads, ... of a gradient of tile x tile.
template <int kThreads, int kRows, int kPitch, int kMost>
__device__ __forceinline__ void multiply_rows(const float (&left)[kRows][kPitch], const float (&right)[kRows][kPitch],
                                              int tile, float (&sum)[kMost]) {
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int e = static_cast<int>(threadIdx.x) + i * kThreads;
    if (e >= tile * tile) break;
    float v = 0.f;
#pragma unroll 8
    for (int r = 0; r < kRows; ++r) v = fmaf(left[r][e / tile], right[r][e % tile], v);
    sum[i] += v;
  }
}

}  // namespace sbnet::portable
