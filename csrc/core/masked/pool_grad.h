// Gradient of a pooling on the active blocks of its output: of a maximum, dy goes to the first of equal values, or to
// the last NaN, as PyTorch has it; of an average, its share goes to each pixel. All of dx is written.
#pragma once
#include "core/masked/pool.h"

namespace sbnet {

struct PoolGradParams {
  PoolParams pool;  // x: of a maximum, what was pooled; y: dy, read in active blocks alone; active: with its block map
  TensorView dx;    // [N, C, H, W] of x.dtype, any strides; must not overlap the others
};

SBNET_EXPORT Status validate(const PoolGradParams& p);

}  // namespace sbnet

SBNET_DECLARE(sparse_pool2d_grad, PoolGradParams)
