#include "core/masked/bottleneck.h"

#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

using Bias = std::optional<Tensor>;
using torch::headeronly::MemoryFormat;

struct BottleneckArguments {
  Tensor weights[3];
  Bias biases[3];
  std::string activation;
  double activation_param;
  bool allow_tf32;
};

void run(const LayerCall& layer, BottleneckArguments a) {
  const char* op = layer.op;
  const Call call(op, "x", layer.x);
  BottleneckParams p = {};
  set_layer(call, layer, &p);
  p.bias_dtype = p.x.dtype;
  constexpr const char *kWeights[] = {"weights[0]", "weights[1]", "weights[2]"},
                       *kBiases[] = {"biases[0]", "biases[1]", "biases[2]"};
  for (int k = 0; k < 3; ++k) {
    call.same_device(kWeights[k], a.weights[k]);
    check_rank(op, kWeights[k], a.weights[k], 4);
    // Kernels need K,R,S,C order; weights kept in channels_last skip this copy.
    a.weights[k] = torch::stable::contiguous(a.weights[k], MemoryFormat::ChannelsLast);
    p.weight[k] = view4(op, kWeights[k], a.weights[k]);
  }
  bool any = false;
  for (int k = 0; k < 3; ++k) {
    DType dtype = p.bias_dtype;
    p.bias[k] = bias_of(call, kBiases[k], a.biases[k], a.weights[k].size(0), &dtype);
    if (!a.biases[k]) continue;
    SBNET_TORCH_EXPECT(!any || dtype == p.bias_dtype, op, std::string(kBiases[k]) + ": dtype",
                       "that of the other biases, ", dtype_name(p.bias_dtype), ", got ", dtype_name(dtype));
    any = true;
    p.bias_dtype = dtype;
  }
  set_activation(op, a, &p);
  p.allow_tf32 = a.allow_tf32;
  launch(call, SBNET_KERNELS(sparse_bottleneck2d_workspace_bytes), SBNET_KERNELS(sparse_bottleneck2d), p, layer.x,
         layer, a);
}

void sparse_bottleneck2d_(Tensor x, Tensor weight1, Tensor weight2, Tensor weight3, Bias bias1, Bias bias2, Bias bias3,
                          Tensor indices, Tensor count, Tensor block_map, Ints grid, std::string activation,
                          double activation_param, bool allow_tf32, Tensor out, std::optional<Tensor> fringe_pixels,
                          std::optional<Tensor> fringe_count) {
  const char* op = "sparse_bottleneck2d_";
  check_rank(op, "x", x, 4);
  check_batch(op, block_map, x);
  run({op, x, indices, count, grid, out, fringe_pixels, fringe_count, block_map},
      {{weight1, weight2, weight3}, {bias1, bias2, bias3}, activation, activation_param, allow_tf32});
}

// Zeros outside the active blocks; y has the memory format of x.
Tensor sparse_bottleneck2d(Tensor x, Tensor weight1, Tensor weight2, Tensor weight3, Bias bias1, Bias bias2, Bias bias3,
                           Tensor indices, Tensor count, Tensor block_map, Ints grid, std::string activation,
                           double activation_param, bool allow_tf32) {
  const char* op = "sparse_bottleneck2d";
  check_rank(op, "x", x, 4);
  const Tensor y = zeros_for(op, x, x.size(1), {x.size(2), x.size(3)}, block_map, grid);
  run({op, x, indices, count, grid, y, {}, {}, block_map},
      {{weight1, weight2, weight3}, {bias1, bias2, bias3}, activation, activation_param, allow_tf32});
  return y;
}

SBNET_TORCH_OPS(ops) {
  ops.add(
      "sparse_bottleneck2d(Tensor x, Tensor weight1, Tensor weight2, Tensor weight3, Tensor? bias1, Tensor? bias2, "
      "Tensor? bias3, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, str activation, float "
      "activation_param, bool allow_tf32) -> Tensor",
      TORCH_BOX(&sparse_bottleneck2d));
  ops.add(
      "sparse_bottleneck2d_(Tensor x, Tensor weight1, Tensor weight2, Tensor weight3, Tensor? bias1, Tensor? bias2, "
      "Tensor? bias3, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, str activation, float "
      "activation_param, bool allow_tf32, Tensor(a!) out, Tensor? fringe_pixels, Tensor? fringe_count) -> ()",
      TORCH_BOX(&sparse_bottleneck2d_));
}

}  // namespace
}  // namespace sbnet::binding
