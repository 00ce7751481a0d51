#include <tuple>

#include "core/masked/activation_grad.h"
#include "core/masked/batch_norm.h"
#include "core/masked/pool_grad.h"
#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

// A tensor of x's shape, dtype and memory format, which the kernel writes all of.
Tensor like(const Tensor& x) { return empty4(x, {x.size(0), x.size(1), x.size(2), x.size(3)}, is_channels_last(x)); }

// The same of zeros, for kernels that write active blocks.
Tensor zeros_like(const Tensor& x) {
  return zeros4(x, {x.size(0), x.size(1), x.size(2), x.size(3)}, is_channels_last(x));
}

const void* parameter_of(const Call& call, const char* name, std::optional<Tensor>& kept, int64_t channels,
                         DType* dtype, bool* given) {
  DType own = *dtype;
  const void* data = bias_of(call, name, kept, channels, &own);
  if (!data) return nullptr;
  SBNET_TORCH_EXPECT(!*given || own == *dtype, call.op(), "weight, bias: dtype", "one for both, got ",
                     dtype_name(*dtype), " and ", dtype_name(own));
  *dtype = own, *given = true;
  return data;
}

// What batch normalisation is called with, forward and backward. `call.op()` is in errors.
template <class Params>
struct NormCall {
  const Call& call;
  const Tensor& x;
  std::optional<Tensor> weight, bias;
  Params p = {};

  NormCall(const Call& on, const Tensor& plane, std::optional<Tensor>& w, std::optional<Tensor>& b,
           const Tensor& indices, const Tensor& count, const Tensor& block_map, const Ints& grid, double eps,
           const Tensor& out)
      : call(on), x(plane), weight(w), bias(b) {
    check_rank(call.op(), "x", x, 4);
    call.same_device("out", out);
    p.x = view4(call.op(), "x", x), p.y = view4(call.op(), "out", out);
    p.active = to_active(call, indices, count, &block_map, grid, x.size(0));
    bool given = false;
    p.param_dtype = p.x.dtype;
    p.weight = parameter_of(call, "weight", weight, x.size(1), &p.param_dtype, &given);
    p.bias = parameter_of(call, "bias", bias, x.size(1), &p.param_dtype, &given);
    p.eps = static_cast<float>(eps);
  }
  void activation(const std::string& name, double param) {
    p.activation = to_activation(call.op(), name);
    p.activation_param = static_cast<float>(param);
  }
  void plane(const char* name, const std::optional<Tensor>& t, TensorView* to) {
    if (!t) return;
    call.same_device(name, *t);
    *to = view4(call.op(), name, *t);
  }
  void fringe(const std::optional<Tensor>& pixels, const std::optional<Tensor>& count) {
    SBNET_TORCH_EXPECT(pixels.has_value() == count.has_value(), call.op(), "fringe",
                       "pixels and count, got one of them");
    if (!pixels) return;
    p.fringe.capacity = pixels->numel();
    p.fringe.pixels = call.int32("fringe", *pixels, p.fringe.capacity);
    p.fringe.count = call.int32("fringe", *count, 1);
  }
};

// float32 of so many elements that a kernel moves in place.
float* numbers_of(const Call& call, const char* name, const Tensor& t, int64_t count) {
  call.same_device(name, t);
  SBNET_TORCH_EXPECT(t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.numel() == count, call.op(), name,
                     "contiguous float32 of ", count, " elements, got another tensor");
  return static_cast<float*>(t.data_ptr());
}

// [2 C + 1] float32: mean and variance of each channel, how many pixels were active.
Tensor run_norm(NormCall<BatchNormParams>& norm) {
  const int64_t numbers = 2 * norm.x.size(1) + 1;
  const Tensor statistics = torch::stable::new_empty(norm.x, {&numbers, 1}, ScalarType::Float);
  BatchNormParams& p = norm.p;
  p.statistics = static_cast<float*>(statistics.data_ptr());
  p.follow.statistics = p.statistics, p.follow.channels = norm.x.size(1);
  check(norm.call.op(), validate(p));
  const Tensor scratch = workspace(norm.x, sbnet_sparse_batch_norm2d_workspace_bytes(&p));
  check(norm.call.op(), SBNET_KERNELS(sparse_batch_norm2d)(norm.call, &p, scratch.data_ptr()));
  return statistics;
}

std::tuple<Tensor, Tensor> sparse_batch_norm2d(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias,
                                               Tensor indices, Tensor count, Tensor block_map, Ints grid, double eps) {
  const char* op = "sparse_batch_norm2d";
  const Call call(op, "x", x);
  check_rank(op, "x", x, 4);
  const Tensor y = zeros_like(x);
  NormCall<BatchNormParams> norm(call, x, weight, bias, indices, count, block_map, grid, eps, y);
  return {y, run_norm(norm)};
}

Tensor sparse_batch_norm2d_(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias,
                            std::optional<Tensor> residual, Tensor indices, Tensor count, Tensor block_map, Ints grid,
                            double eps, std::string activation, double activation_param, Tensor out,
                            std::optional<Tensor> fringe_pixels, std::optional<Tensor> fringe_count,
                            std::optional<Tensor> running_mean, std::optional<Tensor> running_var, double momentum) {
  const char* op = "sparse_batch_norm2d_";
  const Call call(op, "x", x);
  NormCall<BatchNormParams> norm(call, x, weight, bias, indices, count, block_map, grid, eps, out);
  norm.activation(activation, activation_param);
  norm.plane("residual", residual, &norm.p.residual);
  norm.fringe(fringe_pixels, fringe_count);
  SBNET_TORCH_EXPECT(running_mean.has_value() == running_var.has_value(), op, "running_mean, running_var",
                     "both of them, got one");
  if (running_mean) {
    norm.p.follow.running_mean = numbers_of(call, "running_mean", *running_mean, x.size(1));
    norm.p.follow.running_var = numbers_of(call, "running_var", *running_var, x.size(1));
    norm.p.follow.momentum = static_cast<float>(momentum);
  }
  return run_norm(norm);
}

// [2, C] float32: the gradients of weight and bias.
Tensor run_norm_backward(NormCall<BatchNormGradParams>& norm, const Tensor& grad, const Tensor& statistics) {
  const Call& call = norm.call;
  const int64_t C = norm.x.size(1), two[2] = {2, C};
  const Tensor params = torch::stable::new_empty(norm.x, {two, 2}, ScalarType::Float);
  BatchNormGradParams& p = norm.p;
  call.same_device("grad", grad);
  p.grad = view4(call.op(), "grad", grad);
  const Tensor numbers = vector_of(call, "statistics", statistics, 2 * C + 1);
  SBNET_TORCH_EXPECT(numbers.scalar_type() == ScalarType::Float, call.op(), "statistics: dtype",
                     "float32, got another");
  p.statistics = static_cast<const float*>(numbers.const_data_ptr());
  p.grad_params = static_cast<float*>(params.data_ptr());
  check(call.op(), validate(p));
  const Tensor scratch = workspace(norm.x, sbnet_sparse_batch_norm2d_backward_workspace_bytes(&p));
  check(call.op(), SBNET_KERNELS(sparse_batch_norm2d_backward)(call, &p, scratch.data_ptr()));
  return params;
}

// dx, and the gradients of weight and bias.
std::tuple<Tensor, Tensor> sparse_batch_norm2d_backward(Tensor grad, Tensor x, std::optional<Tensor> weight,
                                                        Tensor statistics, Tensor indices, Tensor count,
                                                        Tensor block_map, Ints grid, double eps) {
  const char* op = "sparse_batch_norm2d_backward";
  const Call call(op, "x", x);
  check_rank(op, "x", x, 4);
  const Tensor y = zeros_like(x);
  std::optional<Tensor> bias;
  NormCall<BatchNormGradParams> norm(call, x, weight, bias, indices, count, block_map, grid, eps, y);
  const Tensor params = run_norm_backward(norm, grad, statistics);
  return {y, params};
}

// Writes dx, and the residual's gradient where one is wanted, in active blocks.
Tensor sparse_batch_norm2d_backward_(Tensor grad, Tensor x, std::optional<Tensor> given, std::optional<Tensor> weight,
                                     std::optional<Tensor> bias, Tensor statistics, Tensor indices, Tensor count,
                                     Tensor block_map, Ints grid, double eps, std::string activation,
                                     double activation_param, Tensor out, std::optional<Tensor> grad_residual,
                                     std::optional<Tensor> fringe_pixels, std::optional<Tensor> fringe_count) {
  const Call call("sparse_batch_norm2d_backward_", "x", x);
  NormCall<BatchNormGradParams> norm(call, x, weight, bias, indices, count, block_map, grid, eps, out);
  norm.activation(activation, activation_param);
  norm.plane("given", given, &norm.p.given);
  norm.plane("grad_residual", grad_residual, &norm.p.grad_residual);
  norm.fringe(fringe_pixels, fringe_count);
  return run_norm_backward(norm, grad, statistics);
}

void batch_norm_follow_(Tensor running_mean, Tensor running_var, Tensor statistics, double momentum) {
  const char* op = "batch_norm_follow_";
  const Call call(op, "running_mean", running_mean);
  BatchNormFollowParams p = {};
  p.channels = running_mean.numel();
  p.running_mean = numbers_of(call, "running_mean", running_mean, p.channels);
  p.running_var = numbers_of(call, "running_var", running_var, p.channels);
  p.statistics = numbers_of(call, "statistics", statistics, 2 * p.channels + 1);
  p.momentum = static_cast<float>(momentum);
  check(SBNET_KERNELS(batch_norm_follow)(call, &p));
}

Tensor sparse_activation_grad(Tensor grad, Tensor z, std::optional<Tensor> slope, Tensor block_map, Ints grid,
                              std::string activation, double activation_param) {
  const char* op = "sparse_activation_grad";
  const Call call(op, "grad", grad);
  check_rank(op, "z", z, 4);
  call.same_device("z", z);
  const Tensor y = like(z);
  ActivationGradParams p = {};
  p.grad = view4(op, "grad", grad), p.x = view4(op, "z", z), p.y = view4(op, "out", y);
  p.active.grid = to_grid(op, grid);
  p.active.block_map = call.int32("block_map", block_map, blocks_of(p.active.grid, z.size(0)));
  p.activation = to_activation(op, activation);
  p.activation_param = static_cast<float>(activation_param);
  p.slope_dtype = DType::kF32;
  p.slope = bias_of(call, "slope", slope, z.size(1), &p.slope_dtype);
  check(op, SBNET_KERNELS(sparse_activation_grad)(call, &p));
  return y;
}

// The same on the blocks of a list, written there alone.
void sparse_activation_grad_(Tensor grad, Tensor z, std::optional<Tensor> slope, Tensor indices, Tensor count,
                             Ints grid, std::string activation, double activation_param, Tensor out,
                             std::optional<Tensor> fringe_pixels, std::optional<Tensor> fringe_count) {
  const char* op = "sparse_activation_grad_";
  const Call call(op, "grad", grad);
  check_rank(op, "z", z, 4);
  ActivationGradParams p = {};
  set_layer(call, {op, z, indices, count, grid, out, fringe_pixels, fringe_count}, &p);
  call.same_device("grad", grad);
  p.grad = view4(op, "grad", grad);
  p.activation = to_activation(op, activation);
  p.activation_param = static_cast<float>(activation_param);
  p.slope_dtype = DType::kF32;
  p.slope = bias_of(call, "slope", slope, z.size(1), &p.slope_dtype);
  check(op, SBNET_KERNELS(sparse_activation_grad)(call, &p));
}

void activate_blocks_(Tensor x, std::optional<Tensor> other, Tensor block_map, Ints grid, std::string activation,
                      double activation_param) {
  const char* op = "activate_blocks_";
  const Call call(op, "x", x);
  ActivationParams p = {};
  p.y = view4(op, "x", x);
  if (other) {
    call.same_device("other", *other);
    p.other = view4(op, "other", *other);
  }
  p.active.grid = to_grid(op, grid);
  p.active.block_map = call.int32("block_map", block_map, blocks_of(p.active.grid, x.size(0)));
  p.activation = to_activation(op, activation);
  p.activation_param = static_cast<float>(activation_param);
  check(op, SBNET_KERNELS(sparse_activation)(call, &p));
}

struct PoolNumbers {
  bool maximum;
  Ints kernel, stride, padding, dilation;
  bool ceil_mode, count_include_pad;
  int64_t divisor;  // 0 for none of its own
};

// `out`: dx. `x_map`: the blocks of x's plane that are written; all of it without.
void pool_gradient(const Call& call, const Tensor& grad, const Tensor& x, const Tensor& block_map, const Ints& grid,
                   const PoolNumbers& n, const Tensor& out, const Tensor* x_map, const Ints& x_grid) {
  const char* op = call.op();
  call.same_device("x", x);
  call.same_device("out", out);
  PoolGradParams p = {};
  p.pool.kind = n.maximum ? PoolKind::kMax : PoolKind::kAverage;
  p.pool.x = view4(op, "x", x), p.pool.y = view4(op, "grad", grad), p.dx = view4(op, "out", out);
  p.pool.active.grid = to_grid(op, grid);
  p.pool.active.block_map = call.int32("block_map", block_map, blocks_of(p.pool.active.grid, x.size(0)));
  if (x_map) {
    p.dx_grid = to_grid(op, x_grid);
    p.dx_map = call.int32("x_map", *x_map, blocks_of(p.dx_grid, x.size(0)));
  }
  to_pair(op, "kernel_size", n.kernel, p.pool.kernel);
  to_pair(op, "stride", n.stride, p.pool.stride);
  to_pair(op, "padding", n.padding, p.pool.padding);
  to_pair(op, "dilation", n.dilation, p.pool.dilation);
  p.pool.ceil_mode = n.ceil_mode, p.pool.count_include_pad = n.count_include_pad;
  p.pool.divisor_override = to_int32(op, "divisor_override", n.divisor);
  check(op, SBNET_KERNELS(sparse_pool2d_grad)(call, &p));
}

Tensor sparse_pool2d_grad(Tensor grad, Tensor x, Tensor block_map, Ints grid, bool maximum, Ints kernel, Ints stride,
                          Ints padding, Ints dilation, bool ceil_mode, bool count_include_pad, int64_t divisor) {
  const char* op = "sparse_pool2d_grad";
  const Call call(op, "grad", grad);
  check_rank(op, "x", x, 4);
  const Tensor dx = like(x);
  pool_gradient(call, grad, x, block_map, grid,
                {maximum, kernel, stride, padding, dilation, ceil_mode, count_include_pad, divisor}, dx, nullptr, {});
  return dx;
}

void sparse_pool2d_grad_(Tensor grad, Tensor x, Tensor block_map, Ints grid, bool maximum, Ints kernel, Ints stride,
                         Ints padding, Ints dilation, bool ceil_mode, bool count_include_pad, int64_t divisor,
                         Tensor x_map, Ints x_grid, Tensor out) {
  const Call call("sparse_pool2d_grad_", "grad", grad);
  check_rank(call.op(), "x", x, 4);
  pool_gradient(call, grad, x, block_map, grid,
                {maximum, kernel, stride, padding, dilation, ceil_mode, count_include_pad, divisor}, out, &x_map,
                x_grid);
}

SBNET_TORCH_OPS(ops) {
  ops.add(
      "sparse_batch_norm2d(Tensor x, Tensor? weight, Tensor? bias, Tensor indices, Tensor count, Tensor block_map, "
      "SymInt[] grid, float eps) -> (Tensor y, Tensor statistics)",
      TORCH_BOX(&sparse_batch_norm2d));
  ops.add(
      "sparse_batch_norm2d_(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor indices, Tensor count, "
      "Tensor block_map, SymInt[] grid, float eps, str activation, float activation_param, Tensor(a!) out, Tensor? "
      "fringe_pixels, Tensor? fringe_count, Tensor(b!)? running_mean, Tensor(c!)? running_var, float momentum) -> "
      "Tensor",
      TORCH_BOX(&sparse_batch_norm2d_));
  ops.add(
      "sparse_batch_norm2d_backward_(Tensor grad, Tensor x, Tensor? given, Tensor? weight, Tensor? bias, Tensor "
      "statistics, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, float eps, str activation, float "
      "activation_param, Tensor(a!) out, Tensor(b!)? grad_residual, Tensor? fringe_pixels, Tensor? fringe_count) -> "
      "Tensor",
      TORCH_BOX(&sparse_batch_norm2d_backward_));
  ops.add(
      "sparse_activation_grad_(Tensor grad, Tensor z, Tensor? slope, Tensor indices, Tensor count, SymInt[] grid, str "
      "activation, float activation_param, Tensor(a!) out, Tensor? fringe_pixels, Tensor? fringe_count) -> ()",
      TORCH_BOX(&sparse_activation_grad_));
  ops.add(
      "sparse_batch_norm2d_backward(Tensor grad, Tensor x, Tensor? weight, Tensor statistics, Tensor indices, Tensor "
      "count, Tensor block_map, SymInt[] grid, float eps) -> (Tensor grad_x, Tensor grad_params)",
      TORCH_BOX(&sparse_batch_norm2d_backward));
  ops.add(
      "batch_norm_follow_(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor statistics, float momentum) -> ()",
      TORCH_BOX(&batch_norm_follow_));
  ops.add(
      "sparse_pool2d_grad(Tensor grad, Tensor x, Tensor block_map, SymInt[] grid, bool maximum, SymInt[] kernel, "
      "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool ceil_mode, bool count_include_pad, int divisor) -> "
      "Tensor",
      TORCH_BOX(&sparse_pool2d_grad));
  ops.add(
      "sparse_pool2d_grad_(Tensor grad, Tensor x, Tensor block_map, SymInt[] grid, bool maximum, SymInt[] kernel, "
      "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool ceil_mode, bool count_include_pad, int divisor, "
      "Tensor x_map, SymInt[] x_grid, Tensor(a!) out) -> ()",
      TORCH_BOX(&sparse_pool2d_grad_));
  ops.add(
      "activate_blocks_(Tensor(a!) x, Tensor? other, Tensor block_map, SymInt[] grid, str activation, float "
      "activation_param) -> ()",
      TORCH_BOX(&activate_blocks_));
  ops.add(
      "sparse_activation_grad(Tensor grad, Tensor z, Tensor? slope, Tensor block_map, SymInt[] grid, str activation, "
      "float activation_param) -> Tensor",
      TORCH_BOX(&sparse_activation_grad));
}

}  // namespace
}  // namespace sbnet::binding
