// Batch normalisation whose statistics are those of a batch's active pixels, with the sum and the activation that
// follow it, and its gradient:
//   y  = act((x - mean) / sqrt(variance + eps) * weight + bias + residual)
//   g  = act'(y) dy, of the residual, too
//   dx = weight / sqrt(variance + eps) * (g - mean of g - (x - mean) / (variance + eps) * mean of g (x - mean))
// Both are written in active blocks, and zeros in the fringe.
#pragma once
#include "core/masked/activation_grad.h"
#include "core/masked/block_fold.h"
#include "core/masked/norm.h"

namespace sbnet {

// Running statistics move by `momentum` towards those of a batch, whose variance is unbiased then. A batch without an
// active pixel leaves them alone.
struct BatchNormFollowParams {
  const float* statistics;            // [2 C + 1]
  float *running_mean, *running_var;  // [C]; or null: nothing follows
  int64_t channels;
  float momentum;
};

struct BatchNormParams {
  TensorView x;         // [N, C, H, W] float32, float16 or bfloat16, any strides; read in active blocks alone
  TensorView y;         // [N, C, H, W] of x.dtype, any strides; must not overlap x
  TensorView residual;  // of y's shape and dtype, y itself or apart from it; or no data
  ActiveView active;    // tiling grid of the plane, with its block map
  FringeView fringe;
  const void *weight, *bias;  // [C] of param_dtype, or null: 1, 0
  DType param_dtype;          // x.dtype or float32
  float* statistics;          // [2 C + 1]: mean, variance (0 where there is no pixel), how many pixels were active
  BatchNormFollowParams follow;
  float eps;
  Activation activation;
  float activation_param;  // leaky_relu: negative slope
};

struct BatchNormGradParams {
  TensorView grad;   // dy: [N, C, H, W] of x.dtype, any strides; read in active blocks alone
  TensorView x;      // as above
  TensorView y;      // dx; must not overlap the others
  TensorView given;  // what the activation gave (relu, relu6, leaky_relu with a slope above 0); or no data: what
                     // it was of is computed again from x, without a residual
  TensorView grad_residual;  // g, in active blocks; or no data
  ActiveView active;         // with its block map
  FringeView fringe;         // of y
  const void *weight, *bias;
  DType param_dtype;
  const float* statistics;  // of the forward pass
  float* grad_params;       // [2, C]: of weight and bias
  float eps;
  Activation activation;
  float activation_param;
};

SBNET_EXPORT Status validate(const BatchNormParams& p);
SBNET_EXPORT Status validate(const BatchNormGradParams& p);

inline FoldParts parts_of(const BatchNormParams& p, int64_t part_pixels) {
  FoldParts parts = {p.x, p.active.block_map, p.active.grid, {1, 1}, 1, 1, 1};
  deal(&parts, part_pixels);
  return parts;
}

SBNET_HOST_DEVICE inline void follow(const BatchNormFollowParams& p, int64_t c, float mean, float variance,
                                     float pixels) {
  if (!(pixels > 0.f)) return;
  const float unbiased = variance * (pixels / (pixels > 2.f ? pixels - 1.f : 1.f));
  p.running_mean[c] += p.momentum * (mean - p.running_mean[c]);
  p.running_var[c] += p.momentum * (unbiased - p.running_var[c]);
}

SBNET_HOST_DEVICE inline void follow(const BatchNormFollowParams& p, int64_t c) {
  follow(p, c, p.statistics[c], p.statistics[p.channels + c], p.statistics[2 * p.channels]);
}

// Parts of the list whose sums a CPU finds one by one: no more than a few hundred, whatever its capacity.
constexpr int32_t kMostNormParts = 128;
// CTAs of a GPU, one a multiprocessor at most, and channels of one of them.
constexpr int32_t kMostNormCtas = 256, kNormColumn = 64;
// What a GPU's CTAs find: two numbers of each channel, and how many pixels. Columns of channels beyond the number of
// CTAs have one part of the list each.
inline int64_t norm_bytes(const TensorView& x) {
  const int64_t channels = x.size[1] + kNormColumn, least = int64_t{kMostNormCtas} * kNormColumn;
  return size_product({channels > least ? channels : least, 3, 4});
}

}  // namespace sbnet

SBNET_DECLARE(batch_norm_follow, BatchNormFollowParams)
SBNET_DECLARE_WITH_WORKSPACE(sparse_batch_norm2d, BatchNormParams)
SBNET_DECLARE_WITH_WORKSPACE(sparse_batch_norm2d_backward, BatchNormGradParams)
