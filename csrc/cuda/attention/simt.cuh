// Tiles of float32 products by fused multiply-adds: 256 threads, of which (y, x) has rows 4y ... 4y + 3 and columns
// x + 16j.
#pragma once
#include "cuda/attention/portable.cuh"

namespace sbnet::portable::simt {

constexpr int kThreads = 256;
constexpr int kChunk = 32;  // dims of a step of scores; rows of a step of sums
constexpr int kChunkPitch = kChunk + 1, kWeightPitch = kTile + 1;

struct Buffers {
  float left[kTile * kChunkPitch], right[kTile * kChunkPitch];  // chunks of both sides
  float weights[kTile * kWeightPitch], grads[kTile * kWeightPitch];
  float rows[kChunk * 128];  // of what goes by
  uint64_t seen[kTile], kept[kTile];
  QueryRow queries[kTile];
  uint32_t words[kThreads / 32];
};

// A CTA's, once the launch ahead has ended.
__device__ __forceinline__ Buffers& begin() {
  extern __shared__ __align__(16) uint8_t shared[];
  grid_dependency_wait();
  return *reinterpret_cast<Buffers*>(shared);
}

__device__ __forceinline__ int thread_y() { return threadIdx.x / 16; }
__device__ __forceinline__ int thread_x() { return threadIdx.x % 16; }

// 64 positions that lie `stride` apart; from `count` on they read as zeros.
struct Rows {
  const float* data;
  int64_t stride;
  int count;
  __device__ const float* row(int r) const { return r < count ? data + r * stride : nullptr; }
};

template <class From>
__device__ __forceinline__ void load_chunk(const From& from, int dim, int d0, float* to) {
  for (int i = threadIdx.x; i < kTile * kChunk / 4; i += kThreads) {
    const int r = i / (kChunk / 4), d = i % (kChunk / 4) * 4;
    float4 v = {0.f, 0.f, 0.f, 0.f};
    const float* row = from.row(r);
    if (row && d0 + d < dim) v = *reinterpret_cast<const float4*>(row + d0 + d);
    float* at = to + r * kChunkPitch + d;
    at[0] = v.x, at[1] = v.y, at[2] = v.z, at[3] = v.w;
  }
}

// s[i][j] = left row 4y + i . right row x + 16j. Sums of chunks are added up, in the order of delta_of().
template <class Left, class Right, class B>
__device__ __forceinline__ void multiply(const Left& left, const Right& right, int dim, B& b, float (&s)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) s[i][j] = 0.f;
  for (int d0 = 0; d0 < dim; d0 += kChunk) {
    __syncthreads();
    load_chunk(left, dim, d0, b.left);
    load_chunk(right, dim, d0, b.right);
    __syncthreads();
    float part[4][4] = {};
#pragma unroll 8
    for (int d = 0; d < kChunk; ++d) {
      float x[4], y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = b.left[(thread_y() * 4 + i) * kChunkPitch + d];
        y[i] = b.right[(thread_x() + 16 * i) * kChunkPitch + d];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) part[i][j] = fmaf(x[i], y[j], part[i][j]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[i][j] += part[i][j];
  }
}

// sums[i][j] += weights row 4y + i . column c0 + x + 16j of the rows that go by.
template <int kColumns, class From, class B>
__device__ __forceinline__ void accumulate(const float* weights, const From& rows, int dim, int c0, B& b,
                                           float (&sums)[4][kColumns / 16]) {
  float part[4][kColumns / 16] = {};
  for (int r0 = 0; r0 < kTile; r0 += kChunk) {
    __syncthreads();
    for (int i = threadIdx.x; i < kChunk * kColumns / 4; i += kThreads) {
      const int r = r0 + i / (kColumns / 4), d = c0 + i % (kColumns / 4) * 4;
      float4 v = {0.f, 0.f, 0.f, 0.f};
      const float* row = rows.row(r);
      if (row && d < dim) v = *reinterpret_cast<const float4*>(row + d);
      *reinterpret_cast<float4*>(b.rows + i * 4) = v;
    }
    __syncthreads();
#pragma unroll 4
    for (int r = 0; r < kChunk; ++r) {
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = weights[(thread_y() * 4 + i) * kWeightPitch + r0 + r];
#pragma unroll
      for (int j = 0; j < kColumns / 16; ++j) {
        const float v = b.rows[r * kColumns + thread_x() + 16 * j];
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i][j] = fmaf(w[i], v, part[i][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) sums[i][j] += part[i][j];
}

// The largest (the sum) over the 16 threads of a row.
__device__ __forceinline__ float row_max(float v) {
#pragma unroll
  for (int d = 8; d; d /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
  return v;
}
__device__ __forceinline__ float row_sum(float v) {
#pragma unroll
  for (int d = 8; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
  return v;
}

// A step of a row's softmax: its thread's four scores become weights, those of keep(j) in memory, 16 apart; `total` and
// `sums`, which the steps before it made, are brought to the new maximum.
template <int kSums, class Keep>
__device__ __forceinline__ void weigh(const float (&score)[4], float* weights, const Keep& keep, float& largest,
                                      float& total, float (&sums)[kSums]) {
  float top = -INFINITY;
#pragma unroll
  for (float s : score) top = fmaxf(top, s);
  const float before = largest;
  largest = fmaxf(before, row_max(top));
  const float base = largest == -INFINITY ? 0.f : largest;
  const float shrink = before == -INFINITY ? 0.f : expf(before - base);
  float added = 0.f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float e = expf(score[j] - base);
    added += e;
    weights[16 * j] = keep(j) ? e : 0.f;
  }
  total = total * shrink + row_sum(added);
#pragma unroll
  for (float& x : sums) x *= shrink;
}

// The first `count` of the 64 rows of a result, columns c0 ... of it.
template <int kColumns>
__device__ __forceinline__ void store(float* to, int64_t stride, int count, int dim, int c0, const float (&factor)[4],
                                      const float (&sums)[4][kColumns / 16]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = thread_y() * 4 + i;
    if (r >= count) continue;
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) {
      const int d = c0 + thread_x() + 16 * j;
      if (d < dim) to[r * stride + d] = sums[i][j] * factor[i];
    }
  }
}

}  // namespace sbnet::portable::simt
