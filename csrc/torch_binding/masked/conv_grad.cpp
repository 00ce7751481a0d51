#include "core/masked/conv_grad.h"

#include <tuple>
#include <vector>

#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

// The gradient of the weight, in channels_last memory or not, and of the bias: [K] float32, or [0] where it is not
// wanted.
std::tuple<Tensor, Tensor> sparse_conv2d_weight_grad(Tensor x, Tensor grad, Tensor indices, Tensor count, Ints grid,
                                                     Ints kernel, Ints stride, Ints padding, Ints dilation,
                                                     int64_t groups, bool allow_tf32, bool channels_last,
                                                     bool with_bias, bool float32) {
  const char* op = "sparse_conv2d_weight_grad";
  const Call call(op, "x", x);
  call.same_device("grad", grad);
  check_rank(op, "x", x, 4);
  check_rank(op, "grad", grad, 4);
  ConvWeightGradParams p = {};
  p.conv.x = view4(op, "x", x);
  p.conv.y = view4(op, "grad", grad);
  p.conv.active = to_active(call, indices, count, nullptr, grid, x.size(0));
  int32_t sides[2];
  to_pair(op, "kernel", kernel, sides);
  to_pair(op, "stride", stride, p.conv.stride);
  to_pair(op, "padding", padding, p.conv.padding);
  to_pair(op, "dilation", dilation, p.conv.dilation);
  p.conv.groups = to_int32(op, "groups", groups);
  p.conv.allow_tf32 = allow_tf32;
  SBNET_TORCH_EXPECT(groups >= 1 && sides[0] >= 1 && sides[1] >= 1, op, "groups, kernel", "at least 1, got ", groups,
                     ", ", sides[0], "x", sides[1]);
  const int64_t K = grad.size(1), C = x.size(1) / groups;
  const std::optional<ScalarType> dtype = float32 ? std::optional(ScalarType::Float) : std::nullopt;
  const Tensor weight = empty4(x, {K, C, sides[0], sides[1]}, channels_last, dtype);
  const int64_t outputs = with_bias ? K : 0;
  Tensor bias = torch::stable::new_empty(x, {&outputs, 1}, ScalarType::Float);
  p.weight = view4(op, "weight", weight);
  p.conv.weight = p.weight;
  p.bias = with_bias ? static_cast<float*>(bias.data_ptr()) : nullptr;
  check(validate(p));
  const Tensor scratch = workspace(x, SBNET_KERNELS(sparse_conv2d_weight_grad_workspace_bytes).bytes(call, &p));
  check(SBNET_KERNELS(sparse_conv2d_weight_grad)(call, &p, scratch.data_ptr()));
  return {weight, bias};
}

// Weights of one group in a dtype, channels_last, and turned: what their gradients of x are convolutions with. First
// all of the former.
std::vector<Tensor> turn_conv_weights(std::vector<Tensor> weights, ScalarType dtype) {
  const char* op = "turn_conv_weights";
  std::vector<Tensor> found;
  if (weights.empty()) return found;
  const Call call(op, "weights", weights[0]);
  std::vector<TurnWeightParams> all;
  std::vector<Tensor> turned;
  for (const Tensor& weight : weights) {
    call.same_device("weights", weight);
    TurnWeightParams p = {};
    p.weight = view4(op, "weight", weight);
    const int64_t K = weight.size(0), C = weight.size(1), R = weight.size(2), S = weight.size(3);
    found.push_back(empty4(weight, {K, C, R, S}, true, dtype));
    turned.push_back(empty4(weight, {C, K, R, S}, true, dtype));
    p.same = view4(op, "same", found.back()), p.turned = view4(op, "turned", turned.back());
    all.push_back(p);
  }
  const TurnWeightsParams p = {all.data(), static_cast<int64_t>(all.size())};
  check(SBNET_KERNELS(turn_conv_weights)(call, &p));
  found.insert(found.end(), turned.begin(), turned.end());
  return found;
}

SBNET_TORCH_OPS(ops) {
  ops.add("turn_conv_weights(Tensor[] weights, ScalarType dtype) -> Tensor[]", TORCH_BOX(&turn_conv_weights));
  ops.add(
      "sparse_conv2d_weight_grad(Tensor x, Tensor grad, Tensor indices, Tensor count, SymInt[] grid, SymInt[] kernel, "
      "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, bool allow_tf32, bool channels_last, bool "
      "with_bias, bool float32=False) -> (Tensor weight, Tensor bias)",
      TORCH_BOX(&sparse_conv2d_weight_grad));
}

}  // namespace
}  // namespace sbnet::binding
