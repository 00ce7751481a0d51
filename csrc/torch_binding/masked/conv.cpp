#include "core/masked/conv_quantized.h"
#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

using torch::headeronly::MemoryFormat;

// What pack_conv_weight made: nothing on CUDA, whose kernels read weights as they are.
const void* packed_of(const Call& call, const Tensor& packed, const ConvPackParams& p) {
  call.same_device("packed", packed);
  const int64_t wanted = call.cuda() ? 0 : packed_bytes(p);
  SBNET_TORCH_EXPECT(packed.scalar_type() == ScalarType::Byte && packed.is_contiguous() && packed.numel() == wanted,
                     call.op(), "packed", "pack_conv_weight(weight, groups), ", wanted, " bytes, got ", packed.numel(),
                     " elements");
  return wanted ? packed.const_data_ptr() : nullptr;
}

struct ConvArguments {
  Tensor weight;
  std::optional<Tensor> bias, residual;
  Ints stride, padding, dilation;
  int64_t groups;
  std::string activation;
  double activation_param;
  bool allow_tf32;
  std::optional<Tensor> slope;
  bool residual_after;
};

// p's numbers. `a` holds the tensors that p points into.
void set_conv(const Call& call, const LayerCall& layer, ConvArguments& a, Conv2dParams& p) {
  const char* op = layer.op;
  call.same_device("weight", a.weight);
  set_layer(call, layer, &p);
  check_rank(op, "weight", a.weight, 4);
  // Kernels need K,R,S,C order; weights kept in channels_last skip this copy.
  a.weight = torch::stable::contiguous(a.weight, MemoryFormat::ChannelsLast);
  p.weight = view4(op, "weight", a.weight);
  p.bias = bias_of(call, "bias", a.bias, a.weight.size(0), &p.bias_dtype);
  if (a.residual) {
    call.same_device("residual", *a.residual);
    p.residual = view4(op, "residual", *a.residual);
  }
  to_pair(op, "stride", a.stride, p.stride);
  to_pair(op, "padding", a.padding, p.padding);
  to_pair(op, "dilation", a.dilation, p.dilation);
  p.groups = to_int32(op, "groups", a.groups);
  set_activation(op, a, &p);
  p.slope = bias_of(call, "slope", a.slope, a.weight.size(0), &p.slope_dtype);
  p.allow_tf32 = a.allow_tf32;
  p.residual_after = a.residual_after;
}

// Runs p, which is complete but for what was packed. `held`: what it points into.
template <class Bytes, class Op, class Params, class... Held>
void launch_packed(const Call& call, const Bytes& bytes, const Op& kernels, Params& p, const Tensor& x,
                   const std::optional<Tensor>& packed, const Held&... held) {
  check(call.op(), validate(p));
  if (packed) p.packed = packed_of(call, *packed, {p.weight, p.groups});
  const Tensor scratch = workspace(x, bytes.bytes(call, &p));
  check(call.op(), run_in(call, kernels, p, scratch, packed, held...));
}

void run(const LayerCall& layer, ConvArguments a, const std::optional<Tensor>& packed = {}) {
  const Call call(layer.op, "x", layer.x);
  Conv2dParams p = {};
  set_conv(call, layer, a, p);
  launch_packed(call, SBNET_KERNELS(sparse_conv2d_workspace_bytes), SBNET_KERNELS(sparse_conv2d), p, layer.x, packed,
                layer, a);
  Recording* recording = Recording::current();
  if (recording && !call.cuda()) recording->describe(p);
}

void sparse_conv2d_(Tensor x, Tensor weight, std::optional<Tensor> bias, std::optional<Tensor> residual, Tensor indices,
                    Tensor count, Ints grid, Ints stride, Ints padding, Ints dilation, int64_t groups,
                    std::string activation, double activation_param, bool allow_tf32, Tensor out,
                    std::optional<Tensor> fringe_pixels, std::optional<Tensor> fringe_count,
                    std::optional<Tensor> packed, std::optional<Tensor> slope, bool residual_after) {
  run({"sparse_conv2d_", x, indices, count, grid, out, fringe_pixels, fringe_count},
      {weight, bias, residual, stride, padding, dilation, groups, activation, activation_param, allow_tf32, slope,
       residual_after},
      packed);
}

// Of y, before validate() has seen the numbers: 32 bits each, so that nothing overflows.
void output_sides(const char* op, const Tensor& x, const Tensor& weight, const Ints& stride, const Ints& padding,
                  const Ints& dilation, int64_t (&side)[2]) {
  int32_t strides[2], paddings[2], dilations[2];
  to_pair(op, "stride", stride, strides);
  to_pair(op, "padding", padding, paddings);
  to_pair(op, "dilation", dilation, dilations);
  for (int d = 0; d < 2; ++d) {
    SBNET_TORCH_EXPECT(strides[d] >= 1 && dilations[d] >= 1 && paddings[d] >= 0, op, "stride, dilation, padding",
                       "at least 1, 1, 0, got ", strides[d], ", ", dilations[d], ", ", paddings[d]);
    const int64_t reach = x.size(2 + d) + 2 * padding[d] - dilation[d] * (weight.size(2 + d) - 1) - 1;
    SBNET_TORCH_EXPECT(reach >= 0, op, "x", "a side of at least the kernel's reach, got ", x.size(2 + d),
                       " with padding ", padding[d]);
    side[d] = reach / stride[d] + 1;
  }
}

// Zeros outside the active blocks; y has the memory format of x. The list of x is for its gradient, which is wanted in
// those blocks alone.
Tensor sparse_conv2d(Tensor x, Tensor weight, std::optional<Tensor> bias, std::optional<Tensor> residual,
                     Tensor indices, Tensor count, Tensor block_map, Ints grid, Ints stride, Ints padding,
                     Ints dilation, int64_t groups, std::string activation, double activation_param, bool allow_tf32,
                     std::optional<Tensor> slope, bool residual_after, std::optional<Tensor> x_indices,
                     std::optional<Tensor> x_count, std::optional<Tensor> x_map, Ints x_grid) {
  const char* op = "sparse_conv2d";
  check_rank(op, "x", x, 4);
  check_rank(op, "weight", weight, 4);
  check_list_of_x(op, x, x_indices, x_count, x_map, x_grid);
  int64_t side[2];
  output_sides(op, x, weight, stride, padding, dilation, side);
  const Tensor y = zeros_for(op, x, weight.size(0), side, block_map, grid);
  run({op, x, indices, count, grid, y}, {weight, bias, residual, stride, padding, dilation, groups, activation,
                                         activation_param, allow_tf32, slope, residual_after});
  return y;
}

// What a convolution of int8 or float8 has besides.
struct Scales {
  Tensor scale;
  double x, residual, out;
};

void run_quantized(const LayerCall& layer, ConvArguments a, const Scales& scales,
                   const std::optional<Tensor>& packed = {}) {
  const char* op = layer.op;
  const Call call(op, "x", layer.x);
  QuantizedConv2dParams p = {};
  set_conv(call, layer, a, p);
  std::optional<Tensor> scale = scales.scale;
  DType dtype = DType::kF32;
  p.scale = static_cast<const float*>(bias_of(call, "scale", scale, a.weight.size(0), &dtype));
  SBNET_TORCH_EXPECT(dtype == DType::kF32, op, "scale: dtype", "float32, got ", dtype_name(dtype));
  p.x_scale = static_cast<float>(scales.x);
  p.residual_scale = static_cast<float>(scales.residual);
  p.out_scale = static_cast<float>(scales.out);
  launch_packed(call, SBNET_KERNELS(sparse_conv2d_quantized_workspace_bytes), SBNET_KERNELS(sparse_conv2d_quantized), p,
                layer.x, packed, layer, a, scale);
}

void sparse_conv2d_quantized_(Tensor x, Tensor weight, Tensor scale, std::optional<Tensor> bias,
                              std::optional<Tensor> residual, double residual_scale, Tensor indices, Tensor count,
                              Ints grid, Ints stride, Ints padding, Ints dilation, int64_t groups,
                              std::string activation, double activation_param, double out_scale, Tensor out,
                              std::optional<Tensor> fringe_pixels, std::optional<Tensor> fringe_count,
                              std::optional<Tensor> packed, double x_scale, std::optional<Tensor> slope,
                              bool residual_after) {
  run_quantized({"sparse_conv2d_quantized_", x, indices, count, grid, out, fringe_pixels, fringe_count},
                {weight, bias, residual, stride, padding, dilation, groups, activation, activation_param, false, slope,
                 residual_after},
                {scale, x_scale, residual_scale, out_scale}, packed);
}

// A functional form; dtype: of y.
Tensor quantized(const char* op, const LayerCall& layer, const Tensor& block_map, const ConvArguments& a,
                 const Scales& scales, ScalarType dtype) {
  check_rank(op, "x", layer.x, 4);
  check_rank(op, "weight", a.weight, 4);
  int64_t side[2];
  output_sides(op, layer.x, a.weight, a.stride, a.padding, a.dilation, side);
  const Tensor y = zeros_for(op, layer.x, a.weight.size(0), side, block_map, layer.grid, dtype);
  run_quantized({op, layer.x, layer.indices, layer.count, layer.grid, y}, a, scales);
  return y;
}

Tensor sparse_conv2d_quantized(Tensor x, Tensor weight, Tensor scale, std::optional<Tensor> bias,
                               std::optional<Tensor> residual, double residual_scale, Tensor indices, Tensor count,
                               Tensor block_map, Ints grid, Ints stride, Ints padding, Ints dilation, int64_t groups,
                               std::string activation, double activation_param, double out_scale, double x_scale,
                               std::optional<Tensor> slope, bool residual_after) {
  const char* op = "sparse_conv2d_quantized";
  return quantized(op, {op, x, indices, count, grid, x}, block_map,
                   {weight, bias, residual, stride, padding, dilation, groups, activation, activation_param, false,
                    slope, residual_after},
                   {scale, x_scale, residual_scale, out_scale},
                   weight.scalar_type() == ScalarType::Float8_e4m3fn ? ScalarType::Float8_e4m3fn : ScalarType::Char);
}

// The same in float32, or another dtype of floats.
Tensor sparse_conv2d_dequantized(Tensor x, Tensor weight, Tensor scale, std::optional<Tensor> bias,
                                 std::optional<Tensor> residual, double residual_scale, Tensor indices, Tensor count,
                                 Tensor block_map, Ints grid, Ints stride, Ints padding, Ints dilation, int64_t groups,
                                 std::string activation, double activation_param, double x_scale,
                                 std::optional<Tensor> slope, std::optional<ScalarType> dtype, bool residual_after) {
  const char* op = "sparse_conv2d_dequantized";
  return quantized(op, {op, x, indices, count, grid, x}, block_map,
                   {weight, bias, residual, stride, padding, dilation, groups, activation, activation_param, false,
                    slope, residual_after},
                   {scale, x_scale, residual_scale, 0}, dtype.value_or(ScalarType::Float));
}

Tensor pack_conv_weight(Tensor weight, int64_t groups) {
  const char* op = "pack_conv_weight";
  const Call call(op, "weight", weight);
  const ConvPackParams p = {view4(op, "weight", weight), to_int32(op, "groups", groups)};
  check(validate(p));
  const int64_t bytes = call.cuda() ? 0 : packed_bytes(p);
  const Tensor packed = torch::stable::new_zeros(weight, {&bytes, 1}, ScalarType::Byte);  // gaps are equal too
  const Parallel parallel = call.parallel();
  if (!call.cuda()) check(sbnet_pack_conv_weight_cpu(&p, packed.data_ptr(), &parallel));
  return packed;
}

SBNET_TORCH_OPS(ops) {
  ops.add(
      "sparse_conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor indices, Tensor count, Tensor "
      "block_map, SymInt[] grid, SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, str activation, "
      "float activation_param, bool allow_tf32, Tensor? slope=None, bool residual_after=False, Tensor? x_indices=None, "
      "Tensor? x_count=None, Tensor? x_map=None, SymInt[] x_grid=[]) -> Tensor",
      TORCH_BOX(&sparse_conv2d));
  ops.add(
      "sparse_conv2d_(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor indices, Tensor count, SymInt[] "
      "grid, SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, str activation, float "
      "activation_param, bool allow_tf32, Tensor(a!) out, Tensor? fringe_pixels, Tensor? fringe_count, Tensor? "
      "packed=None, Tensor? slope=None, bool residual_after=False) -> ()",
      TORCH_BOX(&sparse_conv2d_));
  ops.add(
      "sparse_conv2d_quantized(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor? residual, float "
      "residual_scale, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, SymInt[] stride, SymInt[] "
      "padding, SymInt[] dilation, SymInt groups, str activation, float activation_param, float out_scale, float "
      "x_scale=0.0, Tensor? slope=None, bool residual_after=False) -> Tensor",
      TORCH_BOX(&sparse_conv2d_quantized));
  ops.add(
      "sparse_conv2d_dequantized(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor? residual, float "
      "residual_scale, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, SymInt[] stride, SymInt[] "
      "padding, SymInt[] dilation, SymInt groups, str activation, float activation_param, float x_scale=0.0, Tensor? "
      "slope=None, ScalarType? dtype=None, bool residual_after=False) -> Tensor",
      TORCH_BOX(&sparse_conv2d_dequantized));
  ops.add(
      "sparse_conv2d_quantized_(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor? residual, float "
      "residual_scale, Tensor indices, Tensor count, SymInt[] grid, SymInt[] stride, SymInt[] padding, SymInt[] "
      "dilation, SymInt groups, str activation, float activation_param, float out_scale, Tensor(a!) out, Tensor? "
      "fringe_pixels, Tensor? fringe_count, Tensor? packed=None, float x_scale=0.0, Tensor? slope=None, bool "
      "residual_after=False) -> ()",
      TORCH_BOX(&sparse_conv2d_quantized_));
  ops.add("pack_conv_weight(Tensor weight, SymInt groups) -> Tensor", TORCH_BOX(&pack_conv_weight));
}

}  // namespace
}  // namespace sbnet::binding
