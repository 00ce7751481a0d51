#include "core/weights/conv.h"

#include "core/grid.h"
#include "torch_binding/common.h"

namespace sbnet::binding {
namespace {

using Ints = std::vector<int64_t>;

VolumeView volume(const char* op, const char* argument, const Tensor& t) {
  check_rank(op, argument, t, 5);
  VolumeView v{address_of(t.data_ptr()), {}, {}, to_dtype(op, argument, t)};
  for (int d = 0; d < 5; ++d) v.size[d] = t.size(d), v.stride[d] = t.stride(d);
  return v;
}

// Channels next to each other. Keep in step with channels_last in sbnet/ops/weights/conv.py.
bool channels_last(const Tensor& t) { return t.stride(1) == 1 && t.stride(4) != 1; }

BlocksparseConvLayout to_layout(const Call& call, const Tensor& tables, const Ints& numbers) {
  SBNET_TORCH_EXPECT(numbers.size() == kConvLayoutNumbers, call.op(), "layout", kConvLayoutNumbers, " numbers, got ",
                     numbers.size());
  const BlocksparseConvShape shape = conv_layout_shape(numbers.data());
  check(validate(call.op(), shape));
  return conv_layout_view(shape, call.int32("tables", tables, conv_layout_words(shape)));
}

// kernel_size, stride, padding, dilation: three numbers each.
ConvGeometry to_geometry(const char* op, const Ints& v) {
  SBNET_TORCH_EXPECT(v.size() == 12, op, "geometry", "12 numbers, got ", v.size());
  ConvGeometry g;
  to_numbers(op, "kernel_size", v, 0, g.kernel), to_numbers(op, "stride", v, 3, g.stride);
  to_numbers(op, "padding", v, 6, g.padding), to_numbers(op, "dilation", v, 9, g.dilation);
  return g;
}

// The tables of a layout, on the CPU: see make_conv_layout.
Tensor blocksparse_conv_tables(Tensor lists, int64_t inputs, int64_t outputs, int64_t taps) {
  const char* op = "blocksparse_conv_tables";
  const Call call(op, "lists", lists);
  check_rank(op, "lists", lists, 1);
  std::vector<int32_t> words;
  check(make_conv_layout(call.int32("lists", lists, lists.size(0)), lists.size(0), inputs, outputs, taps, &words));
  const Tensor tables = empty_int32(lists, {static_cast<int64_t>(words.size())});
  std::copy(words.begin(), words.end(), static_cast<int32_t*>(tables.data_ptr()));
  return tables;
}

struct Filter {
  Tensor weight;
  std::optional<Tensor> bias;
  Tensor tables;
  Ints layout, geometry, output_size;
  bool transposed;
  std::string activation;
  double activation_param;
  std::optional<Tensor> packed;
};

// Bytes that pack_blocksparse_filters makes of filters whose layout has these numbers.
int64_t packed_bytes(const Call& call, const Ints& layout, DType dtype, bool transposed) {
#ifdef SBNET_WITH_CUDA
  if (call.cuda()) return sbnet_blocksparse_packed_bytes_cuda(layout.data(), dtype, transposed);
#endif
  (void)call, (void)layout, (void)dtype, (void)transposed;
  return 0;
}

const void* packed_of(const Call& call, const Tensor& packed, const Ints& layout, const BlocksparseConvParams& p) {
  call.same_device("packed", packed);
  const int64_t wanted = packed_bytes(call, layout, p.x.dtype, p.transposed);
  SBNET_TORCH_EXPECT(packed.scalar_type() == ScalarType::Byte && packed.is_contiguous() && packed.numel() == wanted,
                     call.op(), "packed", "pack_blocksparse_filters(filters, layout), ", wanted, " bytes, got ",
                     packed.numel(), " elements");
  return wanted ? packed.const_data_ptr() : nullptr;
}

// `p.active` is there, if it will be.
Tensor convolve(const Call& call, const Tensor& x, Filter& f, BlocksparseConvParams& p) {
  const char* op = call.op();
  p.x = volume(op, "x", x);
  p.layout = to_layout(call, f.tables, f.layout);
  p.geometry = to_geometry(op, f.geometry);
  p.transposed = f.transposed;
  f.weight = vector_of(call, "weight", f.weight, p.layout.shape.weights);
  SBNET_TORCH_EXPECT(f.weight.scalar_type() == x.scalar_type(), op, "weight", dtype_name(p.x.dtype),
                     ", the dtype of x, got ", dtype_name(to_dtype(op, "weight", f.weight)));
  p.weight = address_of(f.weight.const_data_ptr());
  if (f.packed) p.packed = packed_of(call, *f.packed, f.layout, p);
  const int64_t outputs = p.layout.shape.channels[p.to()];
  if (f.bias) {
    f.bias = vector_of(call, "bias", *f.bias, outputs);
    p.bias = address_of(f.bias->const_data_ptr());
    p.bias_dtype = to_dtype(op, "bias", *f.bias);
  }
  set_activation(op, f, &p);
  const Ints& size = f.output_size;
  SBNET_TORCH_EXPECT(size.size() == 3, op, "output_size", "3 numbers, got ", size.size());
  for (int64_t s : size) SBNET_TORCH_EXPECT(s >= 0 && s <= (1 << 30), op, "output_size", "0 to 2^30, got ", s);
  SBNET_TORCH_EXPECT(size_product({x.size(0), outputs, size[0], size[1], size[2]}) <= int64_t{1} << 40, op,
                     "output_size", "at most 2^40 elements, got more");
  if (p.active.given()) check(check_tiling(op, p.active.grid, size[1], size[2]));
  const int64_t first[5] = {x.size(0), outputs, size[0], size[1], size[2]};
  const int64_t last[5] = {x.size(0), size[0], size[1], size[2], outputs};
  const bool side_by_side = channels_last(x);
  const torch::headeronly::HeaderOnlyArrayRef<int64_t> shape(side_by_side ? last : first, 5);
  Tensor y = p.active.given() ? torch::stable::new_zeros(x, shape) : torch::stable::new_empty(x, shape);
  if (side_by_side)
    for (int d = 4; d > 1; --d) y = torch::stable::transpose(y, d - 1, d);
  p.y = volume(op, "out", y);
  check(validate(p));
  const Tensor scratch = workspace(x, SBNET_KERNELS(blocksparse_conv_workspace_bytes).bytes(call, &p));
  check(SBNET_KERNELS(blocksparse_conv)(call, &p, scratch.data_ptr()));
  return y;
}

Tensor blocksparse_conv(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor tables, Ints layout, Ints geometry,
                        Ints output_size, bool transposed, std::string activation, double activation_param,
                        std::optional<Tensor> packed) {
  const Call call("blocksparse_conv", "x", x);
  Filter f = {weight, bias, tables, layout, geometry, output_size, transposed, activation, activation_param, packed};
  BlocksparseConvParams p = {};
  return convolve(call, x, f, p);
}

// Zeros outside the active blocks; x and y are planes.
Tensor blocksparse_conv_active(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor tables, Ints layout,
                               Ints geometry, Ints output_size, Tensor indices, Tensor count, Tensor block_map,
                               Ints grid, std::string activation, double activation_param,
                               std::optional<Tensor> packed) {
  const Call call("blocksparse_conv_active", "x", x);
  check_batch(call.op(), block_map, x);
  BlocksparseConvParams p = {};
  p.active = to_active(call, indices, count, &block_map, grid, x.size(0));
  check(check_grid(call.op(), p.active.grid));
  Filter f = {weight, bias, tables, layout, geometry, output_size, false, activation, activation_param, packed};
  return convolve(call, x, f, p);
}

Tensor pack_blocksparse_filters(Tensor weight, Tensor tables, Ints layout, bool transposed) {
  const char* op = "pack_blocksparse_filters";
  const Call call(op, "weight", weight);
  BlocksparsePackParams p = {nullptr, nullptr, to_dtype(op, "weight", weight), to_layout(call, tables, layout),
                             transposed};
  weight = vector_of(call, "weight", weight, p.layout.shape.weights);
  p.weight = weight.const_data_ptr();
  const int64_t bytes = packed_bytes(call, layout, p.dtype, transposed);
  const Tensor packed = workspace(weight, bytes);
  p.packed = packed.data_ptr();
#ifdef SBNET_WITH_CUDA
  if (bytes) check(sbnet_pack_blocksparse_filters_cuda(&p, call.stream()));
#endif
  return packed;
}

Tensor blocksparse_conv_weight_grad(Tensor x, Tensor dy, Tensor tables, Ints layout, Ints geometry) {
  const char* op = "blocksparse_conv_weight_grad";
  const Call call(op, "x", x);
  call.same_device("dy", dy);
  BlocksparseConvWeightGradParams p = {};
  p.x = volume(op, "x", x);
  p.dy = volume(op, "dy", dy);
  p.layout = to_layout(call, tables, layout);
  p.geometry = to_geometry(op, geometry);
  const Tensor dw = torch::stable::new_empty(x, {&p.layout.shape.weights, 1});
  p.dw = dw.data_ptr();
  check(validate(p));
  const Tensor scratch = workspace(x, SBNET_KERNELS(blocksparse_conv_weight_grad_workspace_bytes).bytes(call, &p));
  check(SBNET_KERNELS(blocksparse_conv_weight_grad)(call, &p, scratch.data_ptr()));
  return dw;
}

SBNET_TORCH_OPS(ops) {
  // `conv_layout` is BlocksparseConvShape's numbers, `geometry` kernel_size, stride, padding, dilation of three axes
  // each, `output_size` three numbers. x is [N, C, D, H, W]; the filters of all blocks lie in one vector.
  ops.add_of_cpu("blocksparse_conv_tables(Tensor lists, int inputs, int outputs, int taps) -> Tensor",
                 TORCH_BOX(&blocksparse_conv_tables));
  ops.add(
      "blocksparse_conv(Tensor x, Tensor weight, Tensor? bias, Tensor conv_tables, SymInt[] conv_layout, SymInt[] "
      "geometry, SymInt[] output_size, bool transposed, str activation, float activation_param, Tensor? packed=None) "
      "-> "
      "Tensor",
      TORCH_BOX(&blocksparse_conv));
  ops.add(
      "blocksparse_conv_active(Tensor x, Tensor weight, Tensor? bias, Tensor conv_tables, SymInt[] conv_layout, "
      "SymInt[] geometry, SymInt[] output_size, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, str "
      "activation, float activation_param, Tensor? packed=None) -> Tensor",
      TORCH_BOX(&blocksparse_conv_active));
  ops.add(
      "pack_blocksparse_filters(Tensor weight, Tensor conv_tables, SymInt[] conv_layout, bool transposed) -> Tensor",
      TORCH_BOX(&pack_blocksparse_filters));
  ops.add(
      "blocksparse_conv_weight_grad(Tensor x, Tensor dy, Tensor conv_tables, SymInt[] conv_layout, SymInt[] geometry) "
      "-> Tensor",
      TORCH_BOX(&blocksparse_conv_weight_grad));
}

}  // namespace
}  // namespace sbnet::binding
