#include "core/masked/conv_grad.h"

#include <tuple>
#include <vector>

#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

constexpr int kGradNumbers = 21;  // of a layer: grid, kernel, stride, padding, dilation, groups, and four flags

// A layer's gradients: of the weight, in channels_last memory or not, and of the bias: [K] float32, or [0] where it is
// not wanted.
struct WeightGrad {
  ConvWeightGradParams params = {};
  Tensor weight, bias;
};
WeightGrad weight_grad_of(const Call& call, const Tensor& x, const Tensor& grad, const Tensor& indices,
                          const Tensor& count, const int64_t* numbers) {
  const char* op = call.op();
  call.same_device("x", x);
  call.same_device("grad", grad);
  check_rank(op, "x", x, 4);
  check_rank(op, "grad", grad, 4);
  const auto some = [&numbers](int n) {
    numbers += n;
    return Ints(numbers - n, numbers);
  };
  WeightGrad found;
  ConvWeightGradParams& p = found.params;
  p.conv.x = view4(op, "x", x);
  p.conv.y = view4(op, "grad", grad);
  p.conv.active = to_active(call, indices, count, nullptr, some(8), x.size(0));
  int32_t sides[2];
  to_pair(op, "kernel", some(2), sides);
  to_pair(op, "stride", some(2), p.conv.stride);
  to_pair(op, "padding", some(2), p.conv.padding);
  to_pair(op, "dilation", some(2), p.conv.dilation);
  p.conv.groups = to_int32(op, "groups", numbers[0]);
  p.conv.allow_tf32 = numbers[1];
  const bool channels_last = numbers[2], with_bias = numbers[3], float32 = numbers[4];
  SBNET_TORCH_EXPECT(p.conv.groups >= 1 && sides[0] >= 1 && sides[1] >= 1, op, "groups, kernel", "at least 1, got ",
                     p.conv.groups, ", ", sides[0], "x", sides[1]);
  const int64_t K = grad.size(1), C = x.size(1) / p.conv.groups;
  const std::optional<ScalarType> dtype = float32 ? std::optional(ScalarType::Float) : std::nullopt;
  found.weight = empty4(x, {K, C, sides[0], sides[1]}, channels_last, dtype);
  const int64_t outputs = with_bias ? K : 0;
  found.bias = torch::stable::new_empty(x, {&outputs, 1}, ScalarType::Float);
  p.weight = view4(op, "weight", found.weight);
  p.conv.weight = p.weight;
  p.bias = with_bias ? static_cast<float*>(found.bias.data_ptr()) : nullptr;
  return found;
}

void run_weight_grads(const Call& call, const Tensor& x, const ConvWeightGradParams* layers, int64_t count) {
  const ConvWeightGradsParams p = {layers, count};
  check(call.op(), validate(p));
  const Tensor scratch = workspace(x, SBNET_KERNELS(sparse_conv2d_weight_grads_workspace_bytes).bytes(call, &p));
  check(call.op(), SBNET_KERNELS(sparse_conv2d_weight_grads)(call, &p, scratch.data_ptr()));
}

std::tuple<Tensor, Tensor> sparse_conv2d_weight_grad(Tensor x, Tensor grad, Tensor indices, Tensor count, Ints grid,
                                                     Ints kernel, Ints stride, Ints padding, Ints dilation,
                                                     int64_t groups, bool allow_tf32, bool channels_last,
                                                     bool with_bias, bool float32) {
  const Call call("sparse_conv2d_weight_grad", "x", x);
  Ints numbers = grid;
  SBNET_TORCH_EXPECT(grid.size() == 8, call.op(), "grid", "8 numbers, got ", grid.size());
  for (const auto& [name, pair] :
       {std::pair{"kernel", &kernel}, {"stride", &stride}, {"padding", &padding}, {"dilation", &dilation}}) {
    int32_t two[2];
    to_pair(call.op(), name, *pair, two);
    numbers.insert(numbers.end(), two, two + 2);
  }
  for (const int64_t number :
       {groups, int64_t{allow_tf32}, int64_t{channels_last}, int64_t{with_bias}, int64_t{float32}})
    numbers.push_back(number);
  const WeightGrad found = weight_grad_of(call, x, grad, indices, count, numbers.data());
  run_weight_grads(call, x, &found.params, 1);
  return {found.weight, found.bias};
}

// Of several layers. First all gradients of weights.
std::vector<Tensor> sparse_conv2d_weight_grads(std::vector<Tensor> x, std::vector<Tensor> grad,
                                               std::vector<Tensor> indices, std::vector<Tensor> count, Ints numbers) {
  const char* op = "sparse_conv2d_weight_grads";
  const size_t layers = x.size();
  SBNET_TORCH_EXPECT(grad.size() == layers && indices.size() == layers && count.size() == layers &&
                         numbers.size() == layers * kGradNumbers,
                     op, "x, grad, indices, count, numbers", "as many layers each, of ", kGradNumbers, " numbers, got ",
                     layers, ", ", grad.size(), ", ", indices.size(), ", ", count.size(), " and ", numbers.size(),
                     " numbers");
  std::vector<Tensor> found;
  if (!layers) return found;
  const Call call(op, "x", x[0]);
  std::vector<ConvWeightGradParams> all;
  std::vector<Tensor> biases;
  for (size_t k = 0; k < layers; ++k) {
    WeightGrad one = weight_grad_of(call, x[k], grad[k], indices[k], count[k], numbers.data() + k * kGradNumbers);
    all.push_back(one.params);
    found.push_back(one.weight);
    biases.push_back(one.bias);
  }
  run_weight_grads(call, x[0], all.data(), static_cast<int64_t>(layers));
  found.insert(found.end(), biases.begin(), biases.end());
  return found;
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
  ops.add(
      "sparse_conv2d_weight_grads(Tensor[] x, Tensor[] grad, Tensor[] indices, Tensor[] count, SymInt[] numbers) -> "
      "Tensor[]",
      TORCH_BOX(&sparse_conv2d_weight_grads));
  ops.add("turn_conv_weights(Tensor[] weights, ScalarType dtype) -> Tensor[]", TORCH_BOX(&turn_conv_weights));
  ops.add(
      "sparse_conv2d_weight_grad(Tensor x, Tensor grad, Tensor indices, Tensor count, SymInt[] grid, SymInt[] kernel, "
      "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, bool allow_tf32, bool channels_last, bool "
      "with_bias, bool float32=False) -> (Tensor weight, Tensor bias)",
      TORCH_BOX(&sparse_conv2d_weight_grad));
}

}  // namespace
}  // namespace sbnet::binding
