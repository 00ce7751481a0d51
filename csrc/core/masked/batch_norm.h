// Batch normalisation whose statistics are those of a batch's active pixels, and its gradient; zeros elsewhere.
//   y  = (x - mean) / sqrt(variance + eps) * weight + bias
//   dx = weight / sqrt(variance + eps) * (dy - mean of dy - (x - mean) / (variance + eps) * mean of dy (x - mean))
#pragma once
#include "core/masked/block_fold.h"
#include "core/masked/norm.h"

namespace sbnet {

struct BatchNormParams {
  TensorView x;               // [N, C, H, W] float32, float16 or bfloat16, any strides; read in active blocks alone
  TensorView y;               // [N, C, H, W] of x.dtype, any strides: all of it is written; must not overlap x
  ActiveView active;          // tiling grid of the plane, with its block map
  const void *weight, *bias;  // [C] of param_dtype, or null: 1, 0
  DType param_dtype;          // x.dtype or float32
  float* statistics;          // [2 C + 1]: mean, variance (0 where there is no pixel), how many pixels were active
  float eps;
};

struct BatchNormGradParams {
  TensorView grad;    // dy: [N, C, H, W] of x.dtype, any strides; read in active blocks alone
  TensorView x;       // as above
  TensorView y;       // dx: all of it is written; must not overlap the others
  ActiveView active;  // with its block map
  const void* weight;
  DType param_dtype;
  const float* statistics;  // of the forward pass
  float* grad_params;       // [2, C]: of weight and bias
  float eps;
};

// Moves running statistics by `momentum` towards those of a batch, whose variance is unbiased then. A batch without an
// active pixel leaves them alone.
struct BatchNormFollowParams {
  const float* statistics;            // [2 C + 1]
  float *running_mean, *running_var;  // [C]
  int64_t channels;
  float momentum;
};

SBNET_EXPORT Status validate(const BatchNormParams& p);
SBNET_EXPORT Status validate(const BatchNormGradParams& p);

inline FoldParts parts_of(const BatchNormParams& p, int64_t part_pixels) {
  FoldParts parts = {p.x, p.active.block_map, p.active.grid, {1, 1}, 1, 1, 1};
  deal(&parts, part_pixels);
  return parts;
}

SBNET_HOST_DEVICE inline void follow(const BatchNormFollowParams& p, int64_t c) {
  const float pixels = p.statistics[2 * p.channels];
  if (!(pixels > 0.f)) return;
  const float unbiased = p.statistics[p.channels + c] * (pixels / (pixels > 2.f ? pixels - 1.f : 1.f));
  p.running_mean[c] += p.momentum * (p.statistics[c] - p.running_mean[c]);
  p.running_var[c] += p.momentum * (unbiased - p.running_var[c]);
}

// Parts of the list whose sums are found one by one: no more than a few hundred, whatever its capacity.
constexpr int32_t kMostNormParts = 256;

}  // namespace sbnet

SBNET_DECLARE(batch_norm_follow, BatchNormFollowParams)
SBNET_DECLARE_WITH_WORKSPACE(sparse_batch_norm2d, BatchNormParams)
SBNET_DECLARE_WITH_WORKSPACE(sparse_batch_norm2d_backward, BatchNormGradParams)
