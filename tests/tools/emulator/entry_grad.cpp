// What test_conv_grad_emulated.py calls.
#include "conv_case.h"
#include "core/masked/conv_grad.h"
#include "cuda/common.cuh"
#include "cuda/masked/conv_grad.cuh"

namespace {
sbnet::ConvWeightGradParams params_of(const Case& v) {
  using namespace sbnet;
  ConvWeightGradParams p = {};
  p.conv.x = v.view(v.x, v.n, v.c, v.h, v.w), p.conv.y = v.view(v.y, v.n, v.k, v.ho, v.wo);
  p.weight = v.view(v.weight[0], v.k, v.c / v.groups, v.r, v.s), p.conv.weight = p.weight;
  if (v.activation) p.weight.dtype = DType::kF32;
  p.bias = static_cast<float*>(v.bias[0]), p.conv.active = v.active();
  p.conv.groups = v.groups, p.conv.allow_tf32 = true;
  for (int d = 0; d < 2; ++d)
    p.conv.stride[d] = v.stride, p.conv.padding[d] = v.padding, p.conv.dilation[d] = v.dilation;
  return p;
}
}  // namespace

extern "C" {

// y: dy; weight and bias (or null) are written, bias as float32, weight as float32 if `activation` is set. kernel: the
// one that is expected to take it, 0 by cells, 1 by rows, 2 of few channels, 3 the rest, 4
// depthwise. Layers of one call.
__attribute__((visibility("default"))) int emulate_conv_grads(const Case* const* given, int32_t count, char* message,
                                                              int64_t room) {
  using namespace sbnet;
  std::vector<ConvWeightGradParams> layers;
  for (int k = 0; k < count; ++k) {
    const Case& v = *given[k];
    const ConvWeightGradParams p = params_of(v);
    v.device();
    const bool depthwise = is_depthwise(p.conv.weight, p.conv.groups);
    if (v.kernel != (depthwise ? 4 : portable::grad_cells_takes(p) ? 0 : portable::grad_rows_takes(p) ? 1 : portable::grad_few_takes(p) ? 2 : 3)) return 1;
    layers.push_back(p);
  }
  const ConvWeightGradsParams p = {layers.data(), count};
  // NaN: what is not written shows.
  std::vector<uint32_t> workspace(sbnet_sparse_conv2d_weight_grads_workspace_bytes_cuda(&p) / 4 + 1, 0x7fc00000);
  return told(sbnet_sparse_conv2d_weight_grads_cuda(&p, workspace.data(), nullptr), message, room);
}
__attribute__((visibility("default"))) int emulate_conv_grad(const Case* given, char* message, int64_t room) {
  return emulate_conv_grads(&given, 1, message, room);
}
}
