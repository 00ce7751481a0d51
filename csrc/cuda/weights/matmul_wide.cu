// Products with block-sparse weights in blocks of 64 and 128 by mma.sync: float16, bfloat16; every GPU since sm_80.
//
// A CTA of four warps computes as many output features as a block has for 256 or 128 rows, a warp 64 x 64 of them: each
// operand that ldmatrix brings is used four times. Its reduction is the list of input blocks of that output block, 64
// features a stage; stages arrive by cp.async. What lies beyond the rows or the features is zero-filled.
#include "cuda/masked/conv_epilogue.cuh"
#include "cuda/products.cuh"
#include "cuda/weights/matmul_portable.cuh"
#include "cuda/weights/tile.cuh"

namespace sbnet {
namespace portable {
namespace {

constexpr int kThreads = 128, kDepth = 64;

template <int kCols>
struct Wide {
  static constexpr int kRows = kCols == 64 ? 256 : 128, kStages = kCols == 64 ? 2 : 3;
  static constexpr int kXBytes = kRows * kDepth * 2, kStage = kXBytes + kCols * kDepth * 2;
  static constexpr int kOffsets = kStages * kStage, kBytes = kOffsets + kRows * 8;
  static_assert(kBytes <= 99 * 1024);
};

template <class T, int kCols, bool kTransposed>
__global__ void __launch_bounds__(kThreads, 2)
    matmul_wide_kernel(const __grid_constant__ MatmulArgs a, int64_t tiles, int column_tiles) {
  using C = Wide<kCols>;
  constexpr int kWWords = kTransposed ? 8 : kCols / 8;        // of a row of weights
  constexpr int kWPasses = kCols * kDepth / 8 / kThreads;     // words of weights, and of x, for a thread in a stage
  constexpr int kXPasses = C::kRows * kDepth / 8 / kThreads;  // 16 rows apart
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  int64_t* const offsets = reinterpret_cast<int64_t*>(shared + C::kOffsets);
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int row0 = (kCols == 64 ? warp : warp / 2) * 64, column0 = kCols == 64 ? 0 : warp % 2 * 64;
  const int in_features = static_cast<int>(a.p.in_features());
  const T* const x = static_cast<const T*>(a.p.x.data);
  const T* const weight = static_cast<const T*>(a.p.weight);
  grid_dependency_wait();
  const int64_t rows = row_count(a.p.x, a.p.active);

  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t first_row = tile / column_tiles * C::kRows;
    if (first_row >= rows) break;
    const int64_t column = tile % column_tiles;  // an output block
    const EntryList entries(a, column);
    const int stages = entries.count * (kCols / kDepth);
    for (int i = tid; i < C::kRows; i += kThreads) offsets[i] = offset_of_row(a.p.x, a.p.active, first_row + i, rows);
    __syncthreads();
    int2 entry = entries[0];
    const auto load_stage = [&](int s, uint32_t to) {
      const int depth = s * kDepth % kCols, first = entry.x * kCols + depth;
      if (s < stages) {
        const int feature = first + tid % 8 * 8;
        const bool in = entry.x >= 0 && feature < in_features;
#pragma unroll
        for (int i = 0; i < kXPasses; ++i) {
          const int64_t row = offsets[tid / 8 + 16 * i];
          const bool row_in = in && row >= 0;
          cp_async_16(to + tile_word<8>(tid / 8 + 16 * i, tid % 8), x + (row_in ? row + feature : 0), row_in);
        }
        const T* const block = weight + int64_t{entry.y} * kCols * kCols;
#pragma unroll
        for (int i = 0; i < kWPasses; ++i) {
          const int word = tid + i * kThreads, row = word / kWWords, c = word % kWWords;
          const bool w_in = entry.x >= 0 && (kTransposed ? first + c * 8 : first + row) < in_features;
          const int inside = kTransposed ? row * kCols + depth + c * 8 : (depth + row) * kCols + c * 8;
          cp_async_16(to + C::kXBytes + tile_word<kWWords>(row, c), w_in ? block + inside : weight, w_in);
        }
      }
      cp_async_commit();
      if ((s + 1) * kDepth % kCols == 0) entry = entries[(s + 1) * kDepth / kCols];
    };
    float sum[4][8][4] = {};
#pragma unroll
    for (int s = 0; s < C::kStages - 1; ++s) load_stage(s, base + s * C::kStage);
    uint32_t slot = base, free_slot = base + (C::kStages - 1) * C::kStage;
    for (int s = 0; s < stages; ++s) {
      cp_async_wait<C::kStages - 2>();
      __syncthreads();
      load_stage(s + C::kStages - 1, free_slot);
      const uint32_t left_at = slot + tile_word<8>(row0 + lane % 16, lane / 16), w_at = slot + C::kXBytes;
      const uint32_t right_at =
          w_at + (kTransposed ? tile_word<kWWords>(column0 + lane / 16 * 8 + lane % 8, lane / 8 % 2)
                              : tile_word<kWWords>(lane % 16, column0 / 8 + lane / 16));
#pragma unroll
      for (int d = 0; d < kDepth / 16; ++d) {
        uint32_t left[4][4];
#pragma unroll
        for (int m = 0; m < 4; ++m) load_matrix_x4((left_at ^ (d << 5)) + m * 16 * kDepth * 2, left[m]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t right[4];
          if constexpr (kTransposed)
            load_matrix_x4((right_at ^ (d << 5)) + j * 16 * kDepth * 2, right);
          else
            load_matrix_x4_transposed((right_at ^ (j << 5)) + d * 16 * kCols * 2, right);
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            Product<T>::add(sum[m][2 * j], left[m], right[0], right[1]);
            Product<T>::add(sum[m][2 * j + 1], left[m], right[2], right[3]);
          }
        }
      }
      free_slot = slot;
      slot = slot == base + (C::kStages - 1) * C::kStage ? base : slot + C::kStage;
    }
    cp_async_wait<0>();
    __syncthreads();
    // A warp's sums through its own 16 KB of the stages, as float32: then a thread has eight features next to each
    // other.
    const auto sums_at = [&](int row, int word) {
      return reinterpret_cast<float*>(shared + warp * (64 * 64 * 4) + row * 256 + ((word ^ (row & 7) << 1) << 4));
    };
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < 8; ++j)
          *reinterpret_cast<float2*>(sums_at(m * 16 + half * 8 + lane / 4, j * 2 + lane % 4 / 2) + lane % 2 * 2) =
              make_float2(sum[m][j][half * 2], sum[m][j][half * 2 + 1]);
    __syncwarp();
    const int64_t out_features = a.p.out_features();
#pragma unroll 1
    for (int i = lane; i < 64 * 8; i += 32) {
      const int64_t to = offset_of_row(a.p.y, a.p.active, first_row + row0 + i / 8, rows);
      if (to < 0) continue;
      const int64_t k = column * kCols + column0 + i % 8 * 8;
      const float4 low = *reinterpret_cast<const float4*>(sums_at(i / 8, i % 8 * 2));
      const float4 high = *reinterpret_cast<const float4*>(sums_at(i / 8, i % 8 * 2 + 1));
      float v[1][8] = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
      if (a.p.bias) {
#pragma unroll
        for (int e = 0; e < 8; ++e) v[0][e] += k + e < out_features ? bias_of<T>(a.p, k + e) : 0.f;
      }
      activate<true>(a.p.activation, a.p.activation_param, v);
      Pack<T, 8> rounded;
#pragma unroll
      for (int e = 0; e < 8; ++e) rounded.v[e] = from_float<T>(v[0][e]);
      T* y = static_cast<T*>(a.p.y.data) + to + k * a.p.y.stride[1];
      if (a.p.y.stride[1] == 1 && k + 8 <= out_features && reinterpret_cast<uintptr_t>(y) % 16 == 0) {
        *reinterpret_cast<Pack<T, 8>*>(y) = rounded;
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (k + e < out_features) y[e * a.p.y.stride[1]] = rounded.v[e];
      }
    }
    __syncthreads();  // the next tile's offsets and first stages
  }
}

template <class F>
Status by_kind(const MatmulArgs& a, const F& f) {
  const auto of_block = [&](auto t, auto columns) {
    using T = decltype(t);
    return a.p.transposed ? f(std::integral_constant<decltype(&matmul_wide_kernel<T, columns(), true>),
                                                     matmul_wide_kernel<T, columns(), true>>(),
                              columns)
                          : f(std::integral_constant<decltype(&matmul_wide_kernel<T, columns(), false>),
                                                     matmul_wide_kernel<T, columns(), false>>(),
                              columns);
  };
  const auto of_type = [&](auto t) {
    return a.p.layout.shape.block_size == 64 ? of_block(t, std::integral_constant<int, 64>())
                                             : of_block(t, std::integral_constant<int, 128>());
  };
  return a.p.x.dtype == DType::kF16 ? of_type(__half()) : of_type(__nv_bfloat16());
}

}  // namespace

bool suits_wide(const BlocksparseMatmulParams& p, const DeviceInfo& device) {
  const int64_t size = p.layout.shape.block_size, rows = size == 64 ? Wide<64>::kRows : Wide<128>::kRows;
  return p.x.dtype != DType::kF32 && size >= 64 && p.in_features() < INT32_MAX - size &&
         (row_capacity(p.x, p.active) + rows - 1) / rows * p.out_blocks() >= device.sm_count;
}

Status launch_matmul_wide(const MatmulArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  return by_kind(a, [&](auto kernel, auto columns) {
    using C = Wide<columns()>;
    SBNET_TRY((allow_shared<kernel()>(kMatmulOp, device, C::kBytes)));
    return launch_tiles(kernel(), C::kRows, columns(), kThreads, a, device, stream, C::kBytes);
  });
}

}  // namespace portable
}  // namespace sbnet
