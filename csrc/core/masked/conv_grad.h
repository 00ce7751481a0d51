// Gradient of a block-sparse convolution's weight, and of its bias:
//   dW[k, c, r, s] = sum of dy[n, k, i, j] * x[n, c, i * stride + r * dilation - padding, ...] over the active pixels,
// the products of whole rows summed in float32 in a fixed order. (The gradient of x is a convolution itself.)
#pragma once
#include "core/masked/conv.h"

namespace sbnet {

struct ConvWeightGradParams {
  Conv2dParams conv;  // x; y: dy, read in active blocks alone; weight: sizes; stride, padding, dilation, groups,
                      // allow_tf32, active. Nothing else of it is read.
  TensorView weight;  // [K, C/groups, R, S] of x.dtype or float32, any strides: what is written
  float* bias;        // [K]: the sums of dy, or null
};

// Several of them. On a GPU layers that the same kernel takes share a launch, and so do sums of parts.
constexpr int64_t kMostWeightGrads = 256;
struct ConvWeightGradsParams {
  const ConvWeightGradParams* layers;
  int64_t count;
};

// A weight in another dtype and channels_last memory, and turned: the gradient of x of a convolution with a stride of 1
// is a convolution of dy with turned[c, k, r, s] = weight[k, c, R - 1 - r, S - 1 - s].
struct TurnWeightParams {
  TensorView weight;  // [K, C, R, S] float32, float16 or bfloat16, any strides
  TensorView same;    // [K, C, R, S] of a dtype of its own, packed channels_last
  TensorView turned;  // [C, K, R, S] of that dtype, packed channels_last
};

// Several of them: on a GPU a launch for all.
struct TurnWeightsParams {
  const TurnWeightParams* weights;
  int64_t count;
};

// Shapes, dtypes, grid against plane. Everything a kernel relies on.
SBNET_EXPORT Status validate(const ConvWeightGradParams& p);
SBNET_EXPORT Status validate(const ConvWeightGradsParams& p);
SBNET_EXPORT Status validate(const TurnWeightParams& p);
SBNET_EXPORT Status validate(const TurnWeightsParams& p);

}  // namespace sbnet

SBNET_DECLARE_WITH_WORKSPACE_OF_DEVICE(sparse_conv2d_weight_grads, ConvWeightGradsParams)
SBNET_DECLARE(turn_conv_weights, TurnWeightsParams)
