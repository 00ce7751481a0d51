// Block-sparse 2-D convolution of int8: parameters and validation.
#pragma once
#include "core/masked/conv.h"

namespace sbnet {

// Conv2dParams of integers: weight is int8, x is int8 or rounded to it as it is read, and
//   y = activation(scale * conv2d(x, weight) + bias + residual_scale * residual),
// written as float32 or rounded to int8. A float f becomes f * (1 / its scale), rounded (halves to even) and saturated;
// NaN becomes 0. bias and slope are float32; residual and y are int8 or float32, each by itself.
struct QuantizedConv2dParams : Conv2dParams {
  const float* scale;    // [K]: units of y that 1 of the sum of products counts
  float x_scale;         // units of x that 1 of its int8 form counts: above 0 where x is float32, else 0
  float residual_scale;  // units of y that 1 of residual counts
  float out_scale;       // units of y that 1 of the output counts: above 0 where y is int8, else 0
};

SBNET_EXPORT Status validate(const QuantizedConv2dParams& p);

}  // namespace sbnet

extern "C" {
// Weights are packed by sbnet_pack_conv_weight_cpu.
SBNET_EXPORT int64_t sbnet_sparse_conv2d_quantized_workspace_bytes_cpu(const sbnet::QuantizedConv2dParams* p,
                                                                       const void* packed, int32_t threads);
SBNET_EXPORT sbnet::Status sbnet_sparse_conv2d_quantized_cpu(const sbnet::QuantizedConv2dParams* p, const void* packed,
                                                             void* workspace, const sbnet::Parallel* parallel);
SBNET_EXPORT sbnet::Status sbnet_sparse_conv2d_quantized_cuda(const sbnet::QuantizedConv2dParams* p, void* stream);
}
