// Tiles of products by tensor cores (mma.sync, sm_80 on) for float16 and bfloat16: four warps of 16 rows each. Lane l
// of a warp has rows l/4 and l/4 + 8, and columns 2(l%4) and the next of every 8.
#pragma once
#include "cuda/attention/tiles.cuh"

namespace sbnet::portable::wide {

constexpr int kThreads = 128, kWarps = 4, kColumns = 128;  // columns of the output that a CTA sums

// Tiles in shared memory are [64][pitch]; 16 bytes more than a multiple of 32, so that eight rows at one column fall
// into different banks.
__host__ __device__ constexpr int padded(int dim) { return (dim + 15) / 16 * 16; }
__host__ __device__ constexpr int pitch_of(int columns) { return columns + 8; }

// Starts the copy of columns c0 ... c0 + columns of 64 rows; zeros for rows from `count` on and columns from `dim` on.
template <class T>
__device__ __forceinline__ void load_rows(const T* from, int64_t stride, int count, int dim, int c0, int columns,
                                          T* to) {
  const int words = columns / 8;
  for (int i = threadIdx.x; i < kTile * words; i += kThreads) {
    const int r = i / words, c = i % words * 8;
    const bool in = r < count && c0 + c < dim;
    cp_async_16(shared_address(to + r * pitch_of(columns) + c), in ? from + r * stride + c0 + c : from, in);
  }
}

// s[n] += rows of this warp of `left` . rows 8n ... 8n + 7 of `right`, over `columns` columns (a multiple of 16)
template <class T>
__device__ __forceinline__ void multiply(const T* left, int left_pitch, const T* right, int right_pitch, int columns,
                                         float (&s)[8][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t a_at = shared_address(left + (warp * 16 + lane % 16) * left_pitch + lane / 16 * 8);
  const uint32_t b_at = shared_address(right + (lane / 16 * 8 + lane % 8) * right_pitch + lane / 8 % 2 * 8);
  for (int d = 0; d < columns; d += 16) {
    uint32_t a[4];
    load_matrix_x4(a_at + d * 2, a);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t b[4];
      load_matrix_x4(b_at + (n * 16 * right_pitch + d) * 2, b);
      mma_16x8<T>(s[2 * n], a, b[0], b[1]);
      mma_16x8<T>(s[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// sums[n] += weights of this warp's rows . columns 8n ... of the 64 rows of `right`
template <class T>
__device__ __forceinline__ void accumulate(const float (&weights)[8][4], const T* right,
                                           float (&sums)[kColumns / 8][4]) {
  constexpr int kPitch = pitch_of(kColumns);
  const int lane = threadIdx.x % 32;
  const uint32_t b_at = shared_address(right + lane % 16 * kPitch + lane / 16 * 8);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float (&low)[4] = weights[2 * k], (&high)[4] = weights[2 * k + 1];
    const uint32_t a[4] = {pair<T>(low[0], low[1]), pair<T>(low[2], low[3]), pair<T>(high[0], high[1]),
                           pair<T>(high[2], high[3])};
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t b[4];
      load_matrix_x4_transposed(b_at + (k * 16 * kPitch + n * 16) * 2, b);
      mma_16x8<T>(sums[2 * n], a, b[0], b[1]);
      mma_16x8<T>(sums[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// The first `count` of the 64 rows of a result, columns c0 ... of it; factors of this lane's two rows.
template <class T>
__device__ __forceinline__ void store(T* to, int64_t stride, int count, int dim, int c0, float first, float second,
                                      const float (&sums)[kColumns / 8][4]) {
  const int lane = threadIdx.x % 32, r = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
    const int c = c0 + n * 8 + lane % 4 * 2;
    if (c >= dim) break;
    if (r < count) *reinterpret_cast<uint32_t*>(to + r * stride + c) = pair<T>(sums[n][0] * first, sums[n][1] * first);
    if (r + 8 < count)
      *reinterpret_cast<uint32_t*>(to + (r + 8) * stride + c) = pair<T>(sums[n][2] * second, sums[n][3] * second);
  }
}

// Bits and numbers of a tile, after the tiles in shared memory.
struct Buffers {
  uint64_t seen[kTile], kept[kTile];
  QueryRow queries[kTile];
  uint32_t words[kWarps];
};

}  // namespace sbnet::portable::wide
