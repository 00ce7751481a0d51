// A convolution as its tests describe it, in numbers and pointers.
#pragma once
#include <cstdio>

#include "core/masked/conv_quantized.h"
#include "cuda/common.cuh"
#include "machine.h"

// Channel-last tensors, packed: x [n, h, w, c], y [n, ho, wo, k], weight [k, r, s, c / groups], bias [k], residual (or
// null) as y. `kernel`: of those below. Returns 0, or 1 if the kernel does not take it, or 2 and what went wrong.
struct Case {
  int32_t kernel, multiprocessors, seed, type;  // a DType
  int32_t n, h, w, c, k, r, s, stride, padding, dilation, groups, ho, wo, block_h, block_w, activation, residual_after;
  // a bottleneck block has three of weight and bias; k is its width
  void *x, *weight[3], *bias[3], *residual, *y, *slope;
  const int32_t *indices, *count, *block_map, *fringe, *fringe_count;
  int64_t capacity, fringe_capacity;

  sbnet::DType dtype() const { return static_cast<sbnet::DType>(type); }
  sbnet::TensorView view(void* data, int64_t n, int64_t c, int64_t h, int64_t w) const {
    return {data, {n, c, h, w}, {h * w * c, 1, w * c, c}, dtype()};
  }
  sbnet::ActiveView active() const {
    return {
        indices,
        count,
        block_map,
        capacity,
        {{block_h, block_w}, {block_h, block_w}, {0, 0}, {(ho + block_h - 1) / block_h, (wo + block_w - 1) / block_w}}};
  }
  sbnet::DeviceInfo device() const {  // launches remember what they asked a device
    emulator::multiprocessors = multiprocessors;
    emulator::random.seed(seed);
    return {multiprocessors, multiprocessors, 90};
  }
};

// Of bytes: weight is of `dtype`; DTypes of x, y and residual.
struct QuantizedCase {
  Case conv;
  const float *scale, *slope;
  float residual_scale, out_scale, x_scale;
  int32_t dtype, x_dtype, y_dtype, residual_dtype;

  sbnet::QuantizedConv2dParams params() const {
    using sbnet::DType;
    const Case& v = conv;
    sbnet::QuantizedConv2dParams p = {};
    p.x = v.view(v.x, v.n, v.c, v.h, v.w), p.weight = v.view(v.weight[0], v.k, v.c, v.r, v.s);
    p.bias = v.bias[0], p.bias_dtype = DType::kF32, p.y = v.view(v.y, v.n, v.k, v.ho, v.wo);
    if (v.residual) p.residual = v.view(v.residual, v.n, v.k, v.ho, v.wo);
    p.x.dtype = static_cast<DType>(x_dtype), p.weight.dtype = static_cast<DType>(dtype), p.x_scale = x_scale;
    p.y.dtype = static_cast<DType>(y_dtype), p.residual.dtype = static_cast<DType>(residual_dtype);
    p.active = v.active(), p.fringe = {v.fringe, v.fringe_count, v.fringe_capacity};
    p.residual_after = v.residual_after;
    p.groups = 1, p.activation = static_cast<sbnet::Activation>(v.activation), p.activation_param = 0.01f;
    for (int d = 0; d < 2; ++d) p.stride[d] = v.stride, p.padding[d] = v.padding, p.dilation[d] = v.dilation;
    p.scale = scale, p.slope = slope, p.residual_scale = residual_scale, p.out_scale = out_scale;
    return p;
  }
};

inline int told(const sbnet::Status& status, char* message, int64_t room) {
  std::snprintf(message, room, "%s", status.message);
  return status.ok() ? 0 : 2;
}
