// Gradient of a pooling on the active blocks of its output: of a maximum, dy goes to the first of equal values, or to
// the last NaN, as PyTorch has it; of an average, its share goes to each pixel. All of dx is written, or its active
// blocks alone.
#pragma once
#include "core/masked/pool.h"

namespace sbnet {

struct PoolGradParams {
  PoolParams pool;  // x: of a maximum, what was pooled; y: dy, read in active blocks alone; active: with its block map
  TensorView dx;    // [N, C, H, W] of x.dtype, any strides; must not overlap the others
  const int32_t* dx_map;  // [N, dx_grid.count[0], dx_grid.count[1]], the blocks of dx that are written; or null
  BlockGrid dx_grid;      // tiling grid of x's plane
};

SBNET_EXPORT Status validate(const PoolGradParams& p);

}  // namespace sbnet

SBNET_DECLARE(sparse_pool2d_grad, PoolGradParams)
