// An activation on active blocks in place. And its gradient, zeros elsewhere: dx = dy * act'(z), where z is what the
// activation was of. Of relu and leaky_relu with slopes above 0 it may be what the activation gave, too: the sign says
// enough.
#pragma once
#include "core/layer.h"

namespace sbnet {

struct ActivationGradParams {
  TensorView grad;    // dy: [N, C, H, W] float32, float16 or bfloat16, any strides; read in active blocks alone
  TensorView z;       // of the same shape and dtype; likewise
  TensorView y;       // dx: all of it is written; must not overlap the others
  ActiveView active;  // its grid and block map are read: a tiling grid of the plane
  Activation activation;
  float activation_param;  // leaky_relu: negative slope
  const void* slope;       // leaky_relu: [C] of slope_dtype, or null
  DType slope_dtype;       // that of z or float32
};

// y = act(y + other) in place, of the active blocks of a tensor that is 0 elsewhere: all of these activations keep
// zeros.
struct ActivationParams {
  TensorView y;       // [N, C, H, W] float32, float16 or bfloat16, any strides
  TensorView other;   // of the same shape and dtype, apart from y; or no data
  ActiveView active;  // its grid and block map are read
  Activation activation;
  float activation_param;
};

SBNET_EXPORT Status validate(const ActivationGradParams& p);
SBNET_EXPORT Status validate(const ActivationParams& p);

}  // namespace sbnet

SBNET_DECLARE(sparse_activation_grad, ActivationGradParams)
SBNET_DECLARE(sparse_activation, ActivationParams)
