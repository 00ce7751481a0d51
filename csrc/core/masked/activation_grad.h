// An activation on active blocks in place. And its gradient, zeros elsewhere: dx = dy * act'(z), where z is what the
// activation was of. Of relu and leaky_relu with slopes above 0 it may be what the activation gave, too: the sign says
// enough.
#pragma once
#include "core/layer.h"

namespace sbnet {

// Does what it gives say what its gradient is? By the sign, and by where relu6 is cut off.
inline bool told_by_result(Activation activation, float param) {
  return activation == Activation::kRelu || activation == Activation::kRelu6 ||
         (activation == Activation::kLeakyRelu && param > 0);
}

struct ActivationGradParams {
  TensorView grad;    // dy: [N, C, H, W] float32, float16 or bfloat16, any strides; read in active blocks alone
  TensorView x;       // z, of the same shape and dtype; likewise
  TensorView y;       // dx: all of it is written, or with a list its blocks alone; must not overlap the others
  ActiveView active;  // a tiling grid of the plane; its list where it is given, else its block map
  FringeView fringe;  // with a list: zeroed
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
