// Products with block-sparse weights (core/weights/layout.h): parameters, validation, workspace.
//   forward          y  = activation(x . W + bias)
//   input gradient   dx = dy . W^T               the same call with `transposed`: x is dy, y is dx
//   weight gradient  dW[b] = sum over pairs of x[:, c(b)]^T . dy[:, k(b)], for the stored blocks only
//
// Matrices are TensorViews [N, F, H, W] whose rows are the N*H*W pixels and whose columns are the F features. A plain
// [M, F] matrix is size {1, F, 1, M} with its row stride as stride[3] and its feature stride as stride[1]: feature
// axis 1 has stride[1] == 1, feature axis 0 (a matrix [F, M]) has stride[3] == 1.
#pragma once
#include "core/activation.h"
#include "core/kernels.h"
#include "core/weights/layout.h"

namespace sbnet {

struct BlocksparseMatmulParams {
  TensorView x;        // [N, in, H, W] float32, float16 or bfloat16, any strides; in = C, or K when transposed
  TensorView y;        // [N, out, H, W] of x.dtype, any strides; must not overlap x or the weights
  const void* weight;  // [blocks, block_size, block_size] of x.dtype, contiguous, each block [c, k]
  const float* gate;   // [blocks] scales each block, or null. Blocks with gate 0 are skipped, whatever they hold.
  const void* bias;    // [out] contiguous or null
  DType bias_dtype;    // x.dtype or float32
  BlockLayoutView layout;
  const int32_t* plan;  // of make_blocksparse_plan for this pass, on the op's device; null for none
  int64_t plan_words;
  ActiveView active;  // not given: every row. Otherwise the pixels of active blocks alone are read and written.
  bool transposed;    // multiply by W^T
  Activation activation;
  float activation_param;  // leaky_relu: negative slope
  bool allow_tf32;         // float32 on CUDA may use tf32 tensor cores; default false

  SBNET_HOST_DEVICE int64_t in_features() const {
    return transposed ? layout.shape.out_features : layout.shape.in_features;
  }
  SBNET_HOST_DEVICE int64_t out_features() const {
    return transposed ? layout.shape.in_features : layout.shape.out_features;
  }
  SBNET_HOST_DEVICE int64_t in_blocks() const {
    return transposed ? layout.shape.block_columns : layout.shape.block_rows;
  }
  SBNET_HOST_DEVICE int64_t out_blocks() const {
    return transposed ? layout.shape.block_rows : layout.shape.block_columns;
  }
  // Entries (input block, b) of output block o: entries()[start()[o]] ... entries()[start()[o + 1]].
  SBNET_HOST_DEVICE const int32_t* start() const { return transposed ? layout.row_start : layout.column_start; }
  SBNET_HOST_DEVICE const int32_t* entries() const { return transposed ? layout.row_entries : layout.column_entries; }
};

constexpr int kMaxWeightGradPairs = 8;

struct BlocksparseWeightGradParams {
  int32_t pairs;                       // 1 to kMaxWeightGradPairs
  TensorView x[kMaxWeightGradPairs];   // [N, C, H, W] each, of one dtype
  TensorView dy[kMaxWeightGradPairs];  // [N, K, H, W] each, rows as in x of the pair
  void* dw;                            // [blocks, block_size, block_size] of dw_dtype, contiguous
  DType dw_dtype;                      // x.dtype or float32
  BlockLayoutView layout;
  const int32_t* plan;
  int64_t plan_words;
  ActiveView active;  // as above, for all pairs
  bool allow_tf32;
};

SBNET_EXPORT Status validate(const BlocksparseMatmulParams& p);
SBNET_EXPORT Status validate(const BlocksparseWeightGradParams& p);

}  // namespace sbnet

// Workspaces are aligned as allocators do it: to 64 bytes on the CPU, to 256 on CUDA. They hold anything at the call.
SBNET_DECLARE_WITH_WORKSPACE_OF_DEVICE(blocksparse_matmul, BlocksparseMatmulParams)
SBNET_DECLARE_WITH_WORKSPACE_OF_DEVICE(blocksparse_weight_grad, BlocksparseWeightGradParams)
extern "C" {
// Tables in device memory of the current device; returns when they are there. Free takes null too.
SBNET_EXPORT sbnet::Status sbnet_block_layout_upload_cuda(const int32_t* words, int64_t count, int32_t** device);
SBNET_EXPORT void sbnet_block_layout_free_cuda(int32_t* device);
}
