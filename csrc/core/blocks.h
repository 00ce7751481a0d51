// The three SBNet ops: reduce_mask, sparse_gather, sparse_scatter. Semantics: sbnet/reference.py.
#pragma once
#include "core/types.h"

namespace sbnet {

struct ReduceMaskParams {
  const void* mask;  // [N, H, W], any strides
  DType mask_dtype;  // bool, uint8, float16, bfloat16, float32, float64
  int64_t size[3], stride[3];
  BlockGrid grid;
  double tol;    // active iff pooled > tol; compared in float32 (float64 masks: in float64)
  bool avgpool;  // in-plane sum over the FULL block area instead of the maximum
  int64_t capacity;
  int32_t* indices;    // [capacity, 3] out: (n, i, j) in raster order, then -1
  int32_t* count;      // [1] out: min(total, capacity)
  int32_t* total;      // [1] out: active blocks before the capacity cut them
  int32_t* block_map;  // [N, grid.count[0], grid.count[1]] out: slot or -1
};

enum class CopyDirection : int32_t { kGather, kScatter };

// gather: blocks[slot] = plane at block slot; scatter: the other way. One description serves both.
struct BlockCopyParams {
  TensorView plane;   // [N, C, H, W], any strides
  TensorView blocks;  // [rows, C, bh, bw]; packed, either NCHW- or NHWC-ordered
  ActiveView active;  // grid: where a block lies on the plane; capacity = rows of the index list
  CopyDirection direction;
  bool zero_tail;  // gather: rows past the count become 0 (otherwise they are left as they are)
  bool add;        // scatter: add to the plane instead of overwriting it
  bool atomic;     // scatter with add: atomics, order not fixed. Otherwise overlapping blocks are summed per pixel
                   // in raster order, which needs active.block_map.
};

SBNET_EXPORT Status validate(const ReduceMaskParams& p);
Status check_mask(const char* op, DType dtype, const int64_t size[3], const int64_t stride[3]);
SBNET_EXPORT Status validate(const BlockCopyParams& p);

}  // namespace sbnet

extern "C" {
SBNET_EXPORT int64_t sbnet_reduce_mask_workspace_bytes(const sbnet::ReduceMaskParams* p);
SBNET_EXPORT sbnet::Status sbnet_reduce_mask_cpu(const sbnet::ReduceMaskParams* p, void* workspace,
                                                 const sbnet::Parallel* parallel);
SBNET_EXPORT sbnet::Status sbnet_reduce_mask_cuda(const sbnet::ReduceMaskParams* p, void* workspace, void* stream);
SBNET_EXPORT sbnet::Status sbnet_block_copy_cpu(const sbnet::BlockCopyParams* p, const sbnet::Parallel* parallel);
SBNET_EXPORT sbnet::Status sbnet_block_copy_cuda(const sbnet::BlockCopyParams* p, void* stream);
}
