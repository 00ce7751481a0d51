#include "core/masked/conv_transpose.h"

#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

using Optional = std::optional<Tensor>;

// Everything of a call but its list and output.
struct TransposeArguments {
  Tensor weight;
  Optional bias, residual;
  Ints stride, padding, output_padding, dilation;
  int64_t groups;
  std::string activation;
  double activation_param;
  bool allow_tf32;
  Optional slope;
};

ConvTransposeParams geometry(const char* op, const TransposeArguments& a) {
  ConvTransposeParams p = {};
  check_rank(op, "weight", a.weight, 4);
  p.weight = view4(op, "weight", a.weight);
  to_pair(op, "stride", a.stride, p.stride);
  to_pair(op, "padding", a.padding, p.padding);
  to_pair(op, "output_padding", a.output_padding, p.output_padding);
  to_pair(op, "dilation", a.dilation, p.dilation);
  p.groups = to_int32(op, "groups", a.groups);
  check(op, check_transpose_window(p));
  return p;
}

void run(const LayerCall& layer, TransposeArguments a) {
  const char* op = layer.op;
  const Call call(op, "x", layer.x);
  call.same_device("weight", a.weight);
  ConvTransposeParams p = geometry(op, a);
  set_layer(call, layer, &p);
  const int64_t channels = size_product({p.weight.size[1], p.groups});
  p.bias = bias_of(call, "bias", a.bias, channels, &p.bias_dtype);
  p.slope = bias_of(call, "slope", a.slope, channels, &p.slope_dtype);
  if (a.residual) {
    call.same_device("residual", *a.residual);
    p.residual = view4(op, "residual", *a.residual);
  }
  set_activation(op, a, &p);
  p.allow_tf32 = a.allow_tf32;
  launch(call, SBNET_KERNELS(sparse_conv_transpose2d_workspace_bytes), SBNET_KERNELS(sparse_conv_transpose2d), p,
         layer.x, layer, a);
}

void sparse_conv_transpose2d_(Tensor x, Tensor weight, Optional bias, Optional residual, Tensor indices, Tensor count,
                              Ints grid, Ints stride, Ints padding, Ints output_padding, Ints dilation, int64_t groups,
                              std::string activation, double activation_param, bool allow_tf32, Tensor out,
                              Optional fringe_pixels, Optional fringe_count, Optional slope) {
  run({"sparse_conv_transpose2d_", x, indices, count, grid, out, fringe_pixels, fringe_count},
      {weight, bias, residual, stride, padding, output_padding, dilation, groups, activation, activation_param,
       allow_tf32, slope});
}

// The list of x is for its gradient, which is wanted in those blocks alone.
Tensor sparse_conv_transpose2d(Tensor x, Tensor weight, Optional bias, Optional residual, Tensor indices, Tensor count,
                               Tensor block_map, Ints grid, Ints stride, Ints padding, Ints output_padding,
                               Ints dilation, int64_t groups, std::string activation, double activation_param,
                               bool allow_tf32, Optional slope, Optional x_indices, Optional x_count, Optional x_map,
                               Ints x_grid) {
  const char* op = "sparse_conv_transpose2d";
  check_rank(op, "x", x, 4);
  check_list_of_x(op, x, x_indices, x_count, x_map, x_grid);
  const TransposeArguments a = {weight,   bias,   residual,   stride,           padding,    output_padding,
                                dilation, groups, activation, activation_param, allow_tf32, slope};
  const ConvTransposeParams p = geometry(op, a);
  int64_t side[2];
  for (int d = 0; d < 2; ++d) {
    side[d] = conv_transpose_output_side(p, d, x.size(2 + d));
    SBNET_TORCH_EXPECT(side[d] >= 1, op, "x", "a plane that gives pixels, got side ", x.size(2 + d));
  }
  const Tensor y =
      zeros_for(op, x, size_product({p.weight.size[1], p.groups < 0 ? 0 : p.groups}), side, block_map, grid);
  run({op, x, indices, count, grid, y}, a);
  return y;
}

SBNET_TORCH_OPS(ops) {
  ops.add(
      "sparse_conv_transpose2d(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor indices, Tensor count, "
      "Tensor block_map, SymInt[] grid, SymInt[] stride, SymInt[] padding, SymInt[] output_padding, SymInt[] dilation, "
      "SymInt groups, str activation, float activation_param, bool allow_tf32, Tensor? slope=None, Tensor? "
      "x_indices=None, Tensor? x_count=None, Tensor? x_map=None, SymInt[] x_grid=[]) -> Tensor",
      TORCH_BOX(&sparse_conv_transpose2d));
  ops.add(
      "sparse_conv_transpose2d_(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor indices, Tensor count, "
      "SymInt[] grid, SymInt[] stride, SymInt[] padding, SymInt[] output_padding, SymInt[] dilation, SymInt groups, "
      "str activation, float activation_param, bool allow_tf32, Tensor(a!) out, Tensor? fringe_pixels, Tensor? "
      "fringe_count, Tensor? slope=None) -> ()",
      TORCH_BOX(&sparse_conv_transpose2d_));
}

}  // namespace
}  // namespace sbnet::binding
