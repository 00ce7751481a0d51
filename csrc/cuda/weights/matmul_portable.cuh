// What the portable kernels of products with block-sparse weights share, and which of them takes what.
#pragma once
#include <algorithm>
#include <type_traits>

#include "core/weights/matmul.h"
#include "core/weights/rows.h"
#include "cuda/by_dtype.cuh"
#include "cuda/common.cuh"

namespace sbnet {
namespace portable {

constexpr const char* kMatmulOp = "blocksparse_matmul";
constexpr const char* kWeightGradOp = "blocksparse_weight_grad";

// The parameters as kernels read them. With gates, weight and entries are copies in the workspace: gates multiplied
// in, blocks with gate 0 left out, so that `end` is not where the next output block begins.
struct MatmulArgs {
  BlocksparseMatmulParams p;
  const int32_t *start, *end, *entries;
};

// The entries of one output block.
struct EntryList {
  const int2* at;
  int count, in_blocks, blocks;

  __device__ __forceinline__ EntryList(const MatmulArgs& a, int64_t out) {
    blocks = static_cast<int>(a.p.layout.shape.blocks);
    in_blocks = static_cast<int>(a.p.in_blocks());
    const int first = min(max(a.start[out], 0), blocks);
    at = reinterpret_cast<const int2*>(a.entries) + first;
    count = min(max(a.end[out] - first, 0), blocks - first);
  }
  // (input block, stored block), or (-1, -1) beyond the end and for what names no block.
  __device__ __forceinline__ int2 operator[](int i) const {
    int2 e = make_int2(-1, -1);
    if (i < count) e = at[i];
    const bool in = static_cast<unsigned>(e.x) < static_cast<unsigned>(in_blocks) &&
                    static_cast<unsigned>(e.y) < static_cast<unsigned>(blocks);
    return in ? e : make_int2(-1, -1);
  }
};

// Rows there are: of active blocks, as many as their count says.
__device__ __forceinline__ int64_t row_count(const TensorView& t, const ActiveView& active) {
  if (!active.given()) return row_capacity(t, active);
  return static_cast<int64_t>(clamped_count(active.count, static_cast<int>(active.capacity))) * active.grid.size[0] *
         active.grid.size[1];
}

__device__ __forceinline__ int64_t offset_of_row(const TensorView& t, const ActiveView& active, int64_t row,
                                                 int64_t rows) {
  return row < rows ? row_offset(t, row_pixel(t, active, row)) : -1;
}

// May 16-byte words of features be read, the first at a multiple of a word?
inline bool features_vectorize(const TensorView& t) {
  const int64_t lanes = 16 / dtype_size(t.dtype);
  if (t.stride[1] != 1 || reinterpret_cast<uintptr_t>(t.data) % 16 || t.size[1] % lanes) return false;
  for (int d : {0, 2, 3})
    if (t.size[d] > 1 && t.stride[d] % lanes) return false;
  return true;
}

// Rows up to which a product is about reading its weights.
constexpr int64_t kFewRows = 64;
inline bool suits_few(const BlocksparseMatmulParams& p) {
  return p.layout.shape.block_size == 8 && p.x.dtype != DType::kF32 && row_capacity(p.x, p.active) <= kFewRows &&
         std::max(p.in_features(), p.out_features()) < (1 << 29);
}

// A float32 product on tensor cores is one in tf32.
inline bool suits_mma(DType dtype, bool allow_tf32) { return dtype != DType::kF32 || allow_tf32; }

Status launch_matmul_mma(const MatmulArgs& a, const DeviceInfo& device, cudaStream_t stream);
// Blocks of 64 and 128, float16 and bfloat16, enough rows and outputs to fill the device with its large tiles.
bool suits_wide(const BlocksparseMatmulParams& p, const DeviceInfo& device);
Status launch_matmul_wide(const MatmulArgs& a, const DeviceInfo& device, cudaStream_t stream);
Status launch_matmul_few(const MatmulArgs& a, const DeviceInfo& device, cudaStream_t stream);
Status launch_matmul_simt(const MatmulArgs& a, const DeviceInfo& device, cudaStream_t stream);
Status launch_weight_grad_mma(const BlocksparseWeightGradParams& p, const DeviceInfo& device, cudaStream_t stream);
Status launch_weight_grad_simt(const BlocksparseWeightGradParams& p, const DeviceInfo& device, cudaStream_t stream);

// Calls f(std::integral_constant<int, kTile>{}): tiles as wide as the blocks, up to 64.
template <class F>
auto by_tile(int block_size, const F& f) {
  switch (block_size) {
    case 8:
      return f(std::integral_constant<int, 8>{});
    case 16:
      return f(std::integral_constant<int, 16>{});
    case 32:
      return f(std::integral_constant<int, 32>{});
    default:
      return f(std::integral_constant<int, 64>{});
  }
}

// Calls f(T{}, tile) with the element type and such a tile.
template <class F>
Status by_dtype_and_tile(DType dtype, int block_size, const F& f) {
  return by_dtype(dtype, [&](auto t) { return by_tile(block_size, [&](auto tile) { return f(t, tile); }); });
}

// A CTA of `threads` for each tile of rows x columns.
inline Status launch_tiles(void (*kernel)(MatmulArgs, int64_t, int), int rows, int columns, int threads,
                           const MatmulArgs& a, const DeviceInfo& device, cudaStream_t stream, int shared = 0) {
  const int64_t row_tiles = (row_capacity(a.p.x, a.p.active) + rows - 1) / rows;
  const int column_tiles = static_cast<int>(a.p.out_blocks() * (a.p.layout.shape.block_size / columns));
  const int64_t tiles = row_tiles * column_tiles;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(tiles, 1 << 24)));
  SBNET_CUDA_TRY(kMatmulOp,
                 launch_dependent(device, kernel, grid, dim3(threads), shared, stream, a, tiles, column_tiles));
  return ok_status();
}

}  // namespace portable
}  // namespace sbnet
