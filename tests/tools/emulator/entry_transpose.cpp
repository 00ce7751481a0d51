// What test_conv_transpose_emulated.py calls.
#include "conv_case.h"
#include "core/masked/conv_layers.h"
#include "cuda/common.cuh"
#include "cuda/sm90/conv/conv.h"

extern "C" {

// weight [c, r, s, k]; y's plane says what the output padding is.
__attribute__((visibility("default"))) int emulate_conv_transpose(const Case* given, char* message, int64_t room) {
  using namespace sbnet;
  const Case& v = *given;
  ConvTransposeParams p = {};
  p.x = v.view(v.x, v.n, v.c, v.h, v.w), p.weight = v.view(v.weight[0], v.c, v.k, v.r, v.s);
  p.bias = v.bias[0], p.bias_dtype = v.dtype(), p.y = v.view(v.y, v.n, v.k, v.ho, v.wo);
  if (v.residual) p.residual = v.view(v.residual, v.n, v.k, v.ho, v.wo);
  p.active = v.active(), p.fringe = {v.fringe, v.fringe_count, v.fringe_capacity};
  p.slope = v.slope, p.slope_dtype = v.dtype();
  p.groups = 1, p.activation = static_cast<Activation>(v.activation), p.activation_param = 0.01f;
  for (int d = 0; d < 2; ++d) {
    p.stride[d] = v.stride, p.padding[d] = v.padding, p.dilation[d] = v.dilation;
    int64_t least = 0;
    const Status status = ConvTransposeLayer::size(p, 2 + d, p.x.size[2 + d], &least);
    if (!status.ok()) return told(status, message, room);
    p.output_padding[d] = static_cast<int32_t>(p.y.size[2 + d] - least);
  }
  const Status status = validate(p);
  if (!status.ok()) return told(status, message, room);
  if (hopper_transpose_declines(p)) return 1;
  return told(sm90::conv_transpose(p, v.device(), nullptr), message, room);
}
}
