// Block-sparse 2-D convolution of int8 or float8: parameters and validation.
#pragma once
#include "core/masked/conv.h"

namespace sbnet {

// Conv2dParams of bytes: weight is int8 or float8_e4m3fn, x is of its dtype or rounded to it as it is read, and
//   y = activation(scale * conv2d(x, weight) + bias + residual_scale * residual),
// written as a float or rounded to the weight's dtype. A float f becomes f * (1 / its scale), rounded (halves to even)
// and saturated; NaN becomes 0 of int8, and stays NaN of float8. bias and slope are float32; x, residual and y are of
// the weight's dtype or floats, each by itself: float32, float16 or bfloat16, which CPUs take beside float8 alone.
// groups is 1 of float8. Sums of int8 are exact; those of float8 are kept in float32 (docs/kernels/conv_float8.md: on
// Hopper in runs of products).
struct QuantizedConv2dParams : Conv2dParams {
  const float* scale;    // [K]: units of y that 1 of the sum of products counts
  float x_scale;         // units of x that 1 of its form in bytes counts: above 0 where x is of floats, else 0
  float residual_scale;  // units of y that 1 of residual counts
  float out_scale;       // units of y that 1 of the output counts: above 0 where y is of bytes, else 0
};

// May eight channels of a plane, from a multiple of 8 on, be read or written at once?
SBNET_HOST_DEVICE inline bool eights_are_words(const TensorView& t) {
  bool words = t.stride[1] == 1 && reinterpret_cast<uintptr_t>(t.data) % (8 * dtype_size(t.dtype)) == 0;
  for (const int d : {0, 2, 3}) words &= t.size[d] == 1 || t.stride[d] % 8 == 0;
  return words;
}

SBNET_EXPORT Status validate(const QuantizedConv2dParams& p);

}  // namespace sbnet

// Weights of int8 are packed by pack_conv_weight; those of float8 are read as they are.
SBNET_DECLARE_WITH_WORKSPACE_OF_DEVICE(sparse_conv2d_quantized, QuantizedConv2dParams)
