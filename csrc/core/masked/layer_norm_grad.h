// Gradient of sparse_layer_norm2d: of a normalisation over the channels of each active pixel; zeros elsewhere.
//   dx = (g - mean of g - xhat * mean of g xhat) / sigma,  g = dy * weight, xhat = (x - mean) / sigma
#pragma once
#include "core/layer.h"

namespace sbnet {

struct LayerNormGradParams {
  TensorView grad;     // dy: [N, C, H, W] of x.dtype, any strides; read in active blocks alone
  TensorView x;        // [N, C, H, W] float32, float16 or bfloat16, any strides; likewise
  TensorView y;        // dx: all of it is written; must not overlap the others
  ActiveView active;   // tiling grid of the plane, with its block map
  const void* weight;  // [C] of param_dtype, or null: 1
  DType param_dtype;   // x.dtype or float32
  float* grad_params;  // [2, C]: of weight and bias
  float eps;
};

// The most channels that the kernels take.
constexpr int64_t kMostNormChannels = 2048;
// Parts whose sums of channels are found one by one.
constexpr int32_t kMostLayerNormParts = 512;

SBNET_EXPORT Status validate(const LayerNormGradParams& p);

}  // namespace sbnet

SBNET_DECLARE_WITH_WORKSPACE(sparse_layer_norm2d_backward, LayerNormGradParams)
