// Block-sparse 2-D convolution of int8: parameters and validation.
#pragma once
#include "core/masked/conv.h"

namespace sbnet {

// Conv2dParams of integers: x and weight are int8, and
//   y = activation(scale * conv2d(x, weight) + bias + residual_scale * residual),
// written as float32, or divided by out_scale, rounded (halves to even) and saturated to int8; NaN gives 0 then.
// bias is float32; residual and y have one dtype; groups is 1.
struct QuantizedConv2dParams : Conv2dParams {
  const float* scale;    // [K]: units of y that 1 of the sum of products counts
  float residual_scale;  // units of y that 1 of residual counts
  float out_scale;       // units of y that 1 of the output counts: above 0 where y is int8, else 0
};

SBNET_EXPORT Status validate(const QuantizedConv2dParams& p);

}  // namespace sbnet

extern "C" {
// Weights are packed by sbnet_pack_conv_weight_cpu, as one group.
SBNET_EXPORT int64_t sbnet_sparse_conv2d_quantized_workspace_bytes_cpu(const sbnet::QuantizedConv2dParams* p,
                                                                       const void* packed, int32_t threads);
SBNET_EXPORT sbnet::Status sbnet_sparse_conv2d_quantized_cpu(const sbnet::QuantizedConv2dParams* p, const void* packed,
                                                             void* workspace, const sbnet::Parallel* parallel);
SBNET_EXPORT sbnet::Status sbnet_sparse_conv2d_quantized_cuda(const sbnet::QuantizedConv2dParams* p, void* stream);
}
