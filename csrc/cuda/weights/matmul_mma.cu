// Products with block-sparse weights by mma.sync: float16, bfloat16, float32 as tf32; every GPU since sm_80.
//
// A CTA of four warps computes 128 rows x kCols output features, all inside one output block; a warp 32 of the rows.
// Its reduction is the list of input blocks of that output block, one after the other, 64 bytes (32 or 16 features) a
// stage: a stage of blocks of 8 holds several entries, a block of 64 takes several stages. Stages arrive by cp.async,
// four deep. What lies beyond the list, the rows or the features is zero-filled.
#include <algorithm>

#include "cuda/masked/conv_epilogue.cuh"
#include "cuda/mma.cuh"
#include "cuda/weights/matmul_portable.cuh"
#include "cuda/weights/tile.cuh"

namespace sbnet {
namespace portable {
namespace {

constexpr int kThreads = 128, kRows = 128, kStages = 4, kStageBytes = 64;

template <class T, int kCols, bool kTransposed>
__global__ void __launch_bounds__(kThreads) matmul_mma_kernel(const MatmulArgs a, int64_t tiles, int column_tiles) {
  constexpr int kLane = 16 / sizeof(T), kDepth = kStageBytes / sizeof(T), kN = kCols / 8;
  constexpr int kRowWords = kCols * sizeof(T) / 16;  // of a row of weights, where rows are input features
  constexpr int kXBytes = kRows * kStageBytes, kWBytes = kCols * kStageBytes, kStride = kXBytes + kWBytes;
  constexpr int kWords = (kCols * 4 + kThreads - 1) / kThreads;  // of weights, for a thread in a stage
  __shared__ alignas(128) unsigned char shared[kStages * kStride];
  const uint32_t base = shared_address(shared);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int size = a.p.layout.shape.block_size, size_bits = 31 - __clz(size), in_features = a.p.in_features();
  const T* const x = static_cast<const T*>(a.p.x.data);
  const T* const weight = static_cast<const T*>(a.p.weight);
  grid_dependency_wait();
  const int64_t rows = row_count(a.p.x, a.p.active);

  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t first_row = tile / column_tiles * kRows;
    if (first_row >= rows) break;
    const int64_t column = tile % column_tiles * kCols;  // first output feature
    const int in_block = static_cast<int>(column) & (size - 1);
    const EntryList entries(a, column >> size_bits);
    const int depth = entries.count << size_bits, stages = (depth + kDepth - 1) / kDepth;
    int64_t x_row[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x_row[i] = offset_of_row(a.p.x, a.p.active, first_row + tid / 4 + 32 * i, rows);

    // This thread's words of a stage: input features x_depth ... of four rows, and kWords of weights.
    const int x_depth = tid % 4 * kLane;
    const auto w_depth = [&](int i) {
      const int word = tid + i * kThreads;
      return kTransposed ? word % 4 * kLane : word / kRowWords;
    };
    int2 x_entry, w_entry[kWords];  // of the stage that is loaded next: read a stage ahead
    const auto look_up = [&](int s) {
      x_entry = entries[(s * kDepth + x_depth) >> size_bits];
#pragma unroll
      for (int i = 0; i < kWords; ++i) w_entry[i] = entries[(s * kDepth + w_depth(i)) >> size_bits];
    };
    const auto load_stage = [&](int s) {
      const uint32_t to = base + s % kStages * kStride;
      const bool issue = s < stages;
      const int feature = (x_entry.x << size_bits) + ((s * kDepth + x_depth) & (size - 1));
      const bool in = x_entry.x >= 0 && feature < in_features;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool row_in = in && x_row[i] >= 0;
        cp_async_16(to + tile_word<4>(tid / 4 + 32 * i, tid % 4), x + (row_in ? x_row[i] + feature : 0), row_in, issue);
      }
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const int word = tid + i * kThreads;
        if (kCols * 4 % kThreads && word >= kCols * 4) break;
        const int at = (s * kDepth + w_depth(i)) & (size - 1), input = (w_entry[i].x << size_bits) + at;
        const bool w_in = w_entry[i].x >= 0 && input < in_features;
        const int64_t inside = kTransposed ? int64_t{in_block + word / 4} * size + at
                                           : int64_t{at} * size + in_block + word % kRowWords * kLane;
        const int64_t from = (int64_t{w_entry[i].y} << 2 * size_bits) + inside;
        const uint32_t place =
            kTransposed ? tile_word<4>(word / 4, word % 4) : tile_word<kRowWords>(word / kRowWords, word % kRowWords);
        cp_async_16(to + kXBytes + place, weight + (w_in ? from : 0), w_in, issue);
      }
      cp_async_commit();
    };

    float sum[2 * kN][4] = {};
    look_up(0);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      load_stage(s);
      look_up(s + 1);
    }
    for (int s = 0; s < stages; ++s) {
      cp_async_wait<kStages - 2>();
      __syncthreads();
      load_stage(s + kStages - 1);
      look_up(s + kStages);
      const uint32_t at = base + s % kStages * kStride;
      uint32_t left[2][2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          load_matrix_x4(at + tile_word<4>(warp * 32 + i * 16 + lane % 16, k * 2 + lane / 16), left[i][k]);
          to_operand<T>(left[i][k]);
        }
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        uint32_t right[4];  // two products' worth: all of a stage
        if constexpr (kTransposed) {
          load_matrix_x4(at + kXBytes + tile_word<4>(n * 8 + lane % 8, lane / 8), right);
        } else if constexpr (sizeof(T) == 2) {
          load_matrix_x4_transposed(at + kXBytes + tile_word<kRowWords>(lane, n), right);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            right[i] = shared_word(at + kXBytes + tile_word<kRowWords>(i * 4 + lane % 4, n * 2 + lane / 16) +
                                   lane / 4 % 4 * 4);
        }
        to_operand<T>(right);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int k = 0; k < 2; ++k) mma_16x8<T>(sum[i * kN + n], left[i][k], right[2 * k], right[2 * k + 1]);
      }
    }
    cp_async_wait<0>();
    __syncthreads();  // the next tile's first stages

    const int64_t out_features = a.p.out_features();
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int64_t k = column + n * 8 + lane % 4 * 2 + e;
        const float bias = k < out_features ? bias_of<T>(a.p, k) : 0.f;
#pragma unroll
        for (int i = 0; i < 2; ++i) sum[i * kN + n][e] += bias, sum[i * kN + n][2 + e] += bias;
      }
    activate<true>(a.p.activation, a.p.activation_param, sum);  // of halves
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = first_row + warp * 32 + i * 16 + half * 8 + lane / 4;
        const int64_t to = offset_of_row(a.p.y, a.p.active, row, rows);
        if (to < 0) continue;
        T* y = static_cast<T*>(a.p.y.data) + to;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int64_t k = column + n * 8 + lane % 4 * 2 + e;
            if (k < out_features) y[k * a.p.y.stride[1]] = from_float<T>(sum[i * kN + n][half * 2 + e]);
          }
      }
  }
}

}  // namespace

Status launch_matmul_mma(const MatmulArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  return by_dtype_and_tile(a.p.x.dtype, a.p.layout.shape.block_size, [&](auto t, auto tile) {
    using T = decltype(t);
    const auto kernel = a.p.transposed ? matmul_mma_kernel<T, tile(), true> : matmul_mma_kernel<T, tile(), false>;
    return launch_tiles(kernel, kRows, tile(), kThreads, a, device, stream);
  });
}

}  // namespace portable
}  // namespace sbnet
