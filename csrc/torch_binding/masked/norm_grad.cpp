#include "core/masked/norm_grad.h"

#include <tuple>

#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

// [2, C] float32: the gradients of weight and bias. `layer`: of x and dx.
Tensor run(const Call& call, const LayerCall& layer, const Tensor& grad, std::optional<Tensor> weight,
           const std::string& method, int64_t groups, double eps) {
  const char* op = call.op();
  NormGradParams p = {};
  set_layer(call, layer, &p);
  call.same_device("grad", grad);
  p.grad = view4(op, "grad", grad);
  const int64_t C = layer.x.size(1), two[2] = {2, C};
  p.param_dtype = p.x.dtype;
  p.weight = bias_of(call, "weight", weight, C, &p.param_dtype);
  check(op, read_choice(op, "method", kNormNames, method.c_str(), &p.kind));
  p.groups = to_int32(op, "groups", groups);
  p.eps = static_cast<float>(eps);
  const Tensor params = torch::stable::new_empty(layer.x, {two, 2}, ScalarType::Float);
  p.grad_params = static_cast<float*>(params.data_ptr());
  check(op, validate(p));
  const Tensor scratch = workspace(layer.x, sbnet_sparse_norm2d_backward_workspace_bytes(&p));
  check(op, SBNET_KERNELS(sparse_norm2d_backward)(call, &p, scratch.data_ptr()));
  return params;
}

// dx, and the gradients of weight and bias.
std::tuple<Tensor, Tensor> sparse_norm2d_backward(Tensor grad, Tensor x, std::optional<Tensor> weight, Tensor indices,
                                                  Tensor count, Tensor block_map, Ints grid, std::string method,
                                                  int64_t groups, double eps) {
  const char* op = "sparse_norm2d_backward";
  const Call call(op, "x", x);
  check_rank(op, "x", x, 4);
  const Tensor y = zeros4(x, {x.size(0), x.size(1), x.size(2), x.size(3)}, is_channels_last(x));
  const LayerCall layer = {op, x, indices, count, grid, y, std::nullopt, std::nullopt, block_map};
  return {y, run(call, layer, grad, weight, method, groups, eps)};
}

// Writes dx in active blocks.
Tensor sparse_norm2d_backward_(Tensor grad, Tensor x, std::optional<Tensor> weight, Tensor indices, Tensor count,
                               Tensor block_map, Ints grid, std::string method, int64_t groups, double eps, Tensor out,
                               std::optional<Tensor> fringe_pixels, std::optional<Tensor> fringe_count) {
  const char* op = "sparse_norm2d_backward_";
  const Call call(op, "x", x);
  check_rank(op, "x", x, 4);
  return run(call, {op, x, indices, count, grid, out, fringe_pixels, fringe_count, block_map}, grad, weight, method,
             groups, eps);
}

SBNET_TORCH_OPS(ops) {
  ops.add(
      "sparse_norm2d_backward(Tensor grad, Tensor x, Tensor? weight, Tensor indices, Tensor count, Tensor block_map, "
      "SymInt[] grid, str method, SymInt groups, float eps) -> (Tensor grad_x, Tensor grad_params)",
      TORCH_BOX(&sparse_norm2d_backward));
  ops.add(
      "sparse_norm2d_backward_(Tensor grad, Tensor x, Tensor? weight, Tensor indices, Tensor count, Tensor block_map, "
      "SymInt[] grid, str method, SymInt groups, float eps, Tensor(a!) out, Tensor? fringe_pixels, Tensor? "
      "fringe_count) -> "
      "Tensor",
      TORCH_BOX(&sparse_norm2d_backward_));
}

}  // namespace
}  // namespace sbnet::binding
