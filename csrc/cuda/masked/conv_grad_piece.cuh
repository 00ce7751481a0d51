// What a warp of a weight gradient's tile sums: products of two stages that lie pixel by pixel.
#pragma once
#include "cuda/common.cuh"
#include "cuda/products.cuh"

namespace sbnet::portable {
namespace {

enum class Math { kHalf, kTf32, kFloat };

// Sums of a warp's piece of the tile, kM x 16 by kN x 8.
template <class T, Math kMath, int kM, int kN>
struct Piece {
  float sums[kM][kN][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[m][n][e] = 0.f;
  }
  __device__ __forceinline__ void end_stage() {}
  // Pixels `row` ... of a stage: 16 of halves, 8 of tf32.
  template <int kRowBytes>
  __device__ __forceinline__ void multiply(const char* grad, const char* x, int row, int m0, int n0) {
    const int lane = threadIdx.x % 32;
    if constexpr (kMath == Math::kHalf) {
      uint32_t a[kM][4], b[kN / 2][4];
      const int row_a = row + lane / 16 * 8 + lane % 8, row_b = row + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const int word = m0 / 8 + m * 2 + lane / 8 % 2;
        load_matrix_x4_transposed(shared_address(grad) + row_a * kRowBytes + ((word ^ (lane % 8)) << 4), a[m]);
      }
#pragma unroll
      for (int n = 0; n < kN / 2; ++n) {
        const int word = n0 / 8 + n * 2 + lane / 16;
        load_matrix_x4_transposed(shared_address(x) + row_b * kRowBytes + ((word ^ (lane % 8)) << 4), b[n]);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kN; ++n) mma_16x8<T>(sums[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    } else {
      const auto at = [&](const char* from, int pixel, int channel) {
        return *reinterpret_cast<const uint32_t*>(from + pixel * kRowBytes + (((channel / 4) ^ (pixel % 8)) << 4) +
                                                  channel % 4 * 4);
      };
      uint32_t a[kM][4], b[kN][2];
      const int g = lane / 4, t = lane % 4;
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) a[m][e] = round_to_tf32(at(grad, row + t + e / 2 * 4, m0 + m * 16 + g + e % 2 * 8));
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) b[n][e] = round_to_tf32(at(x, row + t + e * 4, n0 + n * 8 + g));
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kN; ++n) mma_16x8<float>(sums[m][n], a[m], b[n][0], b[n][1]);
    }
  }
  // visit(output channel, column, sum) of the tile.
  template <class Visit>
  __device__ __forceinline__ void each(int m0, int n0, const Visit& visit) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          visit(m0 + m * 16 + lane / 4 + e / 2 * 8, n0 + n * 8 + lane % 4 * 2 + e % 2, sums[m][n][e]);
  }
};

// The same of float32 as it is: a thread's 8 x 4 elements of a warp's 32 x 32. A stage is summed by itself: one long
// chain of additions would round as often as there are pixels.
struct FloatPiece {
  float sums[8][4], stage[8][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n) sums[m][n] = stage[m][n] = 0.f;
  }
  __device__ __forceinline__ void end_stage() {
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n) sums[m][n] += stage[m][n], stage[m][n] = 0.f;
  }
  template <int kRowBytes>
  __device__ __forceinline__ void multiply(const char* grad, const char* x, int row, int m0, int n0) {
    const int lane = threadIdx.x % 32, swizzle = row % 8;
    const auto word = [&](const char* from, int channel) {
      return *reinterpret_cast<const float4*>(from + row * kRowBytes + (((channel / 4) ^ swizzle) << 4));
    };
    const float4 low = word(grad, m0 + lane / 8 * 8), high = word(grad, m0 + lane / 8 * 8 + 4);
    const float4 other = word(x, n0 + lane % 8 * 4);
    const float a[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const float b[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n) stage[m][n] += a[m] * b[n];
  }
  template <class Visit>
  __device__ __forceinline__ void each(int m0, int n0, const Visit& visit) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n) visit(m0 + lane / 8 * 8 + m, n0 + lane % 8 * 4 + n, sums[m][n]);
  }
};

}  // namespace
}  // namespace sbnet::portable
