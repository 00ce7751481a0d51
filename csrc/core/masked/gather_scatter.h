// sparse_gather and sparse_scatter: blocks of a plane to a stack, and back. Semantics: sbnet/reference/masked.py.
#pragma once
#include "core/kernels.h"

namespace sbnet {

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

SBNET_EXPORT Status validate(const BlockCopyParams& p);

}  // namespace sbnet

SBNET_DECLARE(block_copy, BlockCopyParams)
