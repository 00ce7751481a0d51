// reduce_mask: a pixel mask becomes a list of active blocks. Semantics: sbnet/reference/lists.py.
#pragma once
#include "core/kernels.h"

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

SBNET_EXPORT Status validate(const ReduceMaskParams& p);
Status check_mask(const char* op, DType dtype, const int64_t size[3], const int64_t stride[3]);

// Of reduce_mask's workspace: first a byte a block (is it active?), rounded up, since CUDA reads 16 of them at a time.
int64_t reduce_mask_block_bytes(const ReduceMaskParams& p);
// Then, where blocks overlap, columns of so many slices of the work on a CPU.
int64_t reduce_mask_slices(const ReduceMaskParams& p);

}  // namespace sbnet

SBNET_DECLARE_WITH_WORKSPACE(reduce_mask, ReduceMaskParams)
