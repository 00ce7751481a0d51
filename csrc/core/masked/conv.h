// Block-sparse 2-D convolution: parameters, validation, workspace.
//   y = activation(conv2d(x, weight) + bias + residual) on the active blocks of the OUTPUT plane, nowhere else,
// or, where the residual comes after, activation(conv2d(x, weight) + bias) + residual.
#pragma once
#include "core/activation.h"
#include "core/kernels.h"

namespace sbnet {

struct Conv2dParams {
  TensorView x;         // [N, C, H, W], any strides
  TensorView weight;    // [K, C/groups, R, S], any strides; K,R,S,C memory order (channels_last) is the fast one
  const void* bias;     // [K] contiguous or null
  DType bias_dtype;     // x.dtype or float32
  TensorView residual;  // [N, K, Ho, Wo] of x.dtype, any strides; data null for none. May alias y.
  TensorView y;         // [N, K, Ho, Wo] of x.dtype, any strides; must not overlap x
  ActiveView active;    // tiling grid of y's plane: offset 0, stride = size, count = ceil(plane / size)
  FringeView fringe;
  int32_t stride[2], padding[2], dilation[2];
  int32_t groups;
  Activation activation;
  float activation_param;  // leaky_relu: negative slope
  const void* slope;       // leaky_relu: [K] contiguous, instead of activation_param, which is one for all; or null
  DType slope_dtype;       // x.dtype or float32
  bool residual_after;     // the residual is added to what the activation gives
  bool allow_tf32;         // float32 on CUDA may use tf32 tensor cores; default false
  const void* packed;      // null, or packed_bytes() that pack_conv_weight filled from weight as it is now. CPUs alone
                           // read it, and refuse one of another shape, dtype, number of groups or instruction set.
};

// Weights in the order in which kernels of a device read them, made once for many calls: a copy, of what the weights
// are then. CUDA kernels read weights as they are.
struct ConvPackParams {
  TensorView weight;  // [K, C/groups, R, S], any strides
  int32_t groups;
};

// Is there a residual that the activation is not of? Without an activation there is no telling.
SBNET_HOST_DEVICE inline bool adds_after(const Conv2dParams& p) {
  return p.residual.data && p.residual_after && p.activation != Activation::kNone;
}

// Has every output channel one input channel, of several?
SBNET_EXPORT bool is_depthwise(const TensorView& weight, int32_t groups);

// Shapes, dtypes, grid against plane, sizes within kernel limits. Everything a kernel relies on.
SBNET_EXPORT Status validate(const Conv2dParams& p);
SBNET_EXPORT Status validate(const ConvPackParams& p);
// Bytes that hold the weights packed for any processor.
SBNET_EXPORT int64_t packed_bytes(const ConvPackParams& p);

}  // namespace sbnet

extern "C" SBNET_EXPORT sbnet::Status sbnet_pack_conv_weight_cpu(const sbnet::ConvPackParams* p, void* packed,
                                                                 const sbnet::Parallel* parallel);
SBNET_DECLARE_WITH_WORKSPACE_OF_DEVICE(sparse_conv2d, Conv2dParams)
