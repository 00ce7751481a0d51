// The gradient of block-sparse weights: dW[b] = sum over pairs of x[:, c(b)]^T dy[:, k(b)], for the stored blocks.
//
// By mma.sync: a CTA of four warps computes one kTile x kTile part of a block. Rows go by in stages of 128 bytes of a
// column (64 or 32 rows), three deep; each warp sums a quarter of a stage's rows over the whole part, and the warps'
// sums are added up at the end, in order. By SIMT: 32 x 32 parts, any strides, true float32.
#include <algorithm>

#include "cuda/mma.cuh"
#include "cuda/weights/matmul_portable.cuh"
#include "cuda/weights/simt.cuh"
#include "cuda/weights/tile.cuh"

namespace sbnet {
namespace portable {
namespace {

// Part (c0, k0) of block b: the CTA's work.
struct Part {
  int64_t block, c0, k0;  // c0, k0: features of the whole matrix
  int row, column;        // within the block

  __device__ __forceinline__ Part(const BlocksparseWeightGradParams& p, int64_t index, int tile) {
    const int per_side = p.layout.shape.block_size / tile;
    block = index / (per_side * per_side);
    const int part = static_cast<int>(index % (per_side * per_side));
    row = part / per_side * tile, column = part % per_side * tile;
    c0 = int64_t{p.layout.coords[2 * block]} * p.layout.shape.block_size + row;
    k0 = int64_t{p.layout.coords[2 * block + 1]} * p.layout.shape.block_size + column;
    if (c0 < 0) c0 = p.layout.shape.in_features;  // no such block: nothing is read
    if (k0 < 0) k0 = p.layout.shape.out_features;
  }
};

template <class T>
__device__ __forceinline__ void store_grad(const BlocksparseWeightGradParams& p, const Part& part, int c, int k,
                                           float v) {
  const int64_t size = p.layout.shape.block_size, at = (part.block * size + part.row + c) * size + part.column + k;
  if (p.dw_dtype == DType::kF32)
    static_cast<float*>(p.dw)[at] = v;
  else
    static_cast<T*>(p.dw)[at] = from_float<T>(v);
}

constexpr int kThreads = 128, kStages = 3;

template <class T, int kTile>
__global__ void __launch_bounds__(kThreads) weight_grad_mma_kernel(const BlocksparseWeightGradParams p, int64_t parts) {
  constexpr int kLane = 16 / sizeof(T), kRows = 128 / sizeof(T), kWarpRows = kRows / 4;
  constexpr int kRowWords = kTile * sizeof(T) / 16, kBytes = kRows * kRowWords * 16, kStride = 2 * kBytes;
  constexpr int kM = kTile < 16 ? 1 : kTile / 16, kN = kTile / 8;
  constexpr int kWords = (kRows * kRowWords + kThreads - 1) / kThreads;
  constexpr int kSums = kTile * kTile * 4;
  __shared__ alignas(128) unsigned char shared[kStages * kStride > kSums ? kStages * kStride : kSums];
  const uint32_t base = shared_address(shared);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  grid_dependency_wait();

  for (int64_t index = blockIdx.x; index < parts; index += gridDim.x) {
    const Part part(p, index, kTile);
    float sum[kM][kN][4] = {};
    // Stages of all pairs in a row: `load` runs ahead of `use` by kStages - 1 and keeps its own place.
    int pair = 0, loaded = 0;
    int64_t row = 0, rows = row_count(p.x[0], p.active);
    const auto load_stage = [&]() {
      while (pair < p.pairs && row >= rows) {
        row = 0;
        if (++pair < p.pairs) rows = row_count(p.x[pair], p.active);
      }
      const bool issue = pair < p.pairs;
      if (issue) {
        const TensorView &x = p.x[pair], &dy = p.dy[pair];
        const uint32_t to = base + loaded % kStages * kStride;
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          const int word = tid + i * kThreads, r = word / kRowWords, w = word % kRowWords;
          if (kRows * kRowWords % kThreads && r >= kRows) break;
          const int64_t x_row = offset_of_row(x, p.active, row + r, rows);
          const int64_t dy_row = offset_of_row(dy, p.active, row + r, rows);
          const int64_t c = part.c0 + w * kLane, k = part.k0 + w * kLane;
          const bool c_in = x_row >= 0 && c < x.size[1], k_in = dy_row >= 0 && k < dy.size[1];
          cp_async_16(to + tile_word<kRowWords>(r, w), static_cast<const T*>(x.data) + (c_in ? x_row + c : 0), c_in);
          cp_async_16(to + kBytes + tile_word<kRowWords>(r, w),
                      static_cast<const T*>(dy.data) + (k_in ? dy_row + k : 0), k_in);
        }
        row += kRows;
        ++loaded;
      }
      cp_async_commit();
    };
    for (int s = 0; s < kStages - 1; ++s) load_stage();
    for (int s = 0; s < loaded; ++s) {
      cp_async_wait<kStages - 2>();
      __syncthreads();
      load_stage();
      const uint32_t x_at = base + s % kStages * kStride, dy_at = x_at + kBytes;
      const int first = warp * kWarpRows;
      uint32_t left[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if constexpr (sizeof(T) == 2) {
          const int word = kTile < 16 ? 0 : m * 2 + lane / 8 % 2;
          load_matrix_x4_transposed(x_at + tile_word<kRowWords>(first + lane / 16 * 8 + lane % 8, word), left[m]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int c = kTile < 16 ? lane / 4 : m * 16 + i % 2 * 8 + lane / 4, r = first + i / 2 * 4 + lane % 4;
            left[m][i] = shared_word(x_at + tile_word<kRowWords>(r, c / 4) + c % 4 * 4);
          }
        }
        if (kTile < 16) left[m][1] = left[m][3] = 0;  // eight of the product's sixteen rows
        to_operand<T>(left[m]);
      }
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        uint32_t right[4];  // of two neighbouring products
        if constexpr (sizeof(T) == 2) {
          const int word = kN == 1 ? 0 : n + lane / 16;
          load_matrix_x4_transposed(dy_at + tile_word<kRowWords>(first + lane % 16, word), right);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int k = (kN == 1 ? 0 : (n + i / 2) * 8) + lane / 4, r = first + i % 2 * 4 + lane % 4;
            right[i] = shared_word(dy_at + tile_word<kRowWords>(r, k / 4) + k % 4 * 4);
          }
        }
        to_operand<T>(right);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma_16x8<T>(sum[m][n], left[m], right[0], right[1]);
          if constexpr (kN > 1) mma_16x8<T>(sum[m][n + 1], left[m], right[2], right[3]);
        }
      }
    }
    cp_async_wait<0>();
    __syncthreads();

    float* const total = reinterpret_cast<float*>(shared);
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w == warp) {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              if (kTile < 16 && e >= 2) break;
              float* to = total + (m * 16 + e / 2 * 8 + lane / 4) * kTile + n * 8 + lane % 4 * 2 + e % 2;
              *to = w ? *to + sum[m][n][e] : sum[m][n][e];
            }
      }
      __syncthreads();
    }
    for (int i = tid; i < kTile * kTile; i += kThreads) store_grad<T>(p, part, i / kTile, i % kTile, total[i]);
    __syncthreads();  // the next part's stages
  }
}

constexpr int kSimtThreads = 256, kSimtTile = 32, kSimtRows = 32;

template <class T>
__global__ void __launch_bounds__(kSimtThreads)
    weight_grad_simt_kernel(const BlocksparseWeightGradParams p, int64_t parts, int tile) {
  constexpr int kMost = kSimtTile * kSimtTile / kSimtThreads;
  __shared__ float left[kSimtRows][kSimtTile + 1], right[kSimtRows][kSimtTile + 1];
  const int tid = threadIdx.x;
  grid_dependency_wait();
  for (int64_t index = blockIdx.x; index < parts; index += gridDim.x) {
    const Part part(p, index, tile);
    float sum[kMost] = {};
    for (int pair = 0; pair < p.pairs; ++pair) {
      const TensorView &x = p.x[pair], &dy = p.dy[pair];
      const int64_t rows = row_count(x, p.active);
      for (int64_t row = 0; row < rows; row += kSimtRows) {
        __syncthreads();
        for (int i = tid; i < kSimtRows * tile; i += kSimtThreads) {
          const auto load = [&](const TensorView& t, int64_t f0, float (&to)[kSimtRows][kSimtTile + 1]) {
            const bool by_feature = t.stride[1] == 1;
            const int r = by_feature ? i / tile : i % kSimtRows, f = by_feature ? i % tile : i / kSimtRows;
            const int64_t at = offset_of_row(t, p.active, row + r, rows);
            const bool in = at >= 0 && f0 + f < t.size[1];
            to[r][f] = in ? to_float(static_cast<const T*>(t.data)[at + (f0 + f) * t.stride[1]]) : 0.f;
          };
          load(x, part.c0, left);
          load(dy, part.k0, right);
        }
        __syncthreads();
        multiply_rows<kSimtThreads>(left, right, tile, sum);
      }
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int e = tid + i * kSimtThreads;
      if (e < tile * tile) store_grad<T>(p, part, e / tile, e % tile, sum[i]);
    }
  }
}

template <class T, int kTile>
Status launch(const BlocksparseWeightGradParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t per_side = p.layout.shape.block_size / kTile, parts = p.layout.shape.blocks * per_side * per_side;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(parts, 1 << 24)));
  SBNET_CUDA_TRY(kWeightGradOp,
                 launch_dependent(device, weight_grad_mma_kernel<T, kTile>, grid, dim3(kThreads), 0, stream, p, parts));
  return ok_status();
}

}  // namespace

Status launch_weight_grad_mma(const BlocksparseWeightGradParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return by_dtype_and_tile(p.x[0].dtype, p.layout.shape.block_size,
                           [&](auto t, auto tile) { return launch<decltype(t), tile()>(p, device, stream); });
}

Status launch_weight_grad_simt(const BlocksparseWeightGradParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const int tile = static_cast<int>(std::min<int64_t>(p.layout.shape.block_size, kSimtTile));
  const int64_t per_side = p.layout.shape.block_size / tile, parts = p.layout.shape.blocks * per_side * per_side;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(parts, 1 << 24)));
  return by_dtype(p.x[0].dtype, [&](auto t) {
    SBNET_CUDA_TRY(kWeightGradOp, launch_dependent(device, weight_grad_simt_kernel<decltype(t)>, grid,
                                                   dim3(kSimtThreads), 0, stream, p, parts, tile));
    return ok_status();
  });
}

}  // namespace portable
}  // namespace sbnet
