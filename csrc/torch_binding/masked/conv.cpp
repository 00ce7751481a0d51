#include "core/masked/conv.h"

#include "core/grid.h"
#include "torch_binding/common.h"

namespace sbnet::binding {

Activation to_activation(const char* op, const std::string& name) {
  const char* names[] = {"none", "relu", "relu6", "leaky_relu", "silu", "gelu", "hardswish"};
  for (int k = 0; k < 7; ++k)
    if (name == names[k]) return static_cast<Activation>(k);
  raise("sbnet::", op, ": activation: '", name, "'; none, relu, relu6, leaky_relu, silu, gelu or hardswish is wanted");
}

namespace {

using Ints = std::vector<int64_t>;
using torch::headeronly::MemoryFormat;

// What pack_conv_weight made: nothing on CUDA, whose kernels read weights as they are.
const void* packed_of(const Call& call, const Tensor& packed, const ConvPackParams& p) {
  call.same_device("packed", packed);
  const int64_t wanted = call.cuda() ? 0 : packed_bytes(p);
  SBNET_TORCH_CHECK(packed.scalar_type() == ScalarType::Byte && packed.is_contiguous() && packed.numel() == wanted,
                    "sbnet::", call.op(), ": packed: ", packed.numel(), " elements; pack_conv_weight(weight, groups), ",
                    wanted, " bytes, is wanted");
  return wanted ? packed.const_data_ptr() : nullptr;
}

struct ConvArguments {
  Tensor x, weight;
  std::optional<Tensor> bias, residual;
  Tensor indices, count;
  Ints grid, stride, padding, dilation;
  int64_t groups;
  std::string activation;
  double activation_param;
  bool allow_tf32;
};

void run(const char* op, ConvArguments a, const Tensor& out, const std::optional<Tensor>& fringe_pixels = {},
         const std::optional<Tensor>& fringe_count = {}, const std::optional<Tensor>& packed_weight = {}) {
  const Call call(op, "x", a.x);
  call.same_device("weight", a.weight);
  call.same_device("out", out);
  Conv2dParams p = {};
  p.x = view4(op, "x", a.x);
  check_rank(op, "weight", a.weight, 4);
  // Kernels want K,R,S,C order; weights kept in channels_last skip this copy.
  a.weight = torch::stable::contiguous(a.weight, MemoryFormat::ChannelsLast);
  p.weight = view4(op, "weight", a.weight);
  if (a.bias) {
    call.same_device("bias", *a.bias);
    SBNET_TORCH_CHECK(a.bias->dim() == 1 && a.bias->size(0) == a.weight.size(0), "sbnet::", op, ": bias: a tensor of ",
                      a.bias->dim(), " dimensions and ", a.bias->numel(), " elements; [", a.weight.size(0),
                      "] is wanted");
    if (!a.bias->is_contiguous()) a.bias = torch::stable::contiguous(*a.bias);
    p.bias = a.bias->const_data_ptr();
    p.bias_dtype = to_dtype(op, "bias", *a.bias);
  }
  p.y = view4(op, "out", out);
  if (a.residual) {
    call.same_device("residual", *a.residual);
    p.residual = view4(op, "residual", *a.residual);
  }
  p.active = to_active(call, a.indices, a.count, nullptr, a.grid, a.x.size(0));
  to_pair(op, "stride", a.stride, p.stride);
  to_pair(op, "padding", a.padding, p.padding);
  to_pair(op, "dilation", a.dilation, p.dilation);
  p.groups = to_int32(op, "groups", a.groups);
  p.activation = to_activation(op, a.activation);
  p.activation_param = static_cast<float>(a.activation_param);
  p.allow_tf32 = a.allow_tf32;
  SBNET_TORCH_CHECK(fringe_pixels.has_value() == fringe_count.has_value(), "sbnet::", op,
                    ": fringe: pixels and count go together");
  if (fringe_pixels) {
    p.fringe.capacity = fringe_pixels->numel();
    p.fringe.pixels = call.int32("fringe", *fringe_pixels, p.fringe.capacity);
    p.fringe.count = call.int32("fringe", *fringe_count, 1);
  }
  check(validate(p));
  const void* packed = packed_weight ? packed_of(call, *packed_weight, {p.weight, p.groups}) : nullptr;
  const Parallel parallel = call.parallel();
  const Tensor scratch =
      workspace(a.x, call.cuda() ? 0 : sbnet_sparse_conv2d_workspace_bytes_cpu(&p, packed, parallel.threads));
  check(SBNET_ON_DEVICE(call, sbnet_sparse_conv2d_cpu(&p, packed, scratch.data_ptr(), &parallel),
                        sbnet_sparse_conv2d_cuda(&p, call.stream())));
}

void sparse_conv2d_(Tensor x, Tensor weight, std::optional<Tensor> bias, std::optional<Tensor> residual, Tensor indices,
                    Tensor count, Ints grid, Ints stride, Ints padding, Ints dilation, int64_t groups,
                    std::string activation, double activation_param, bool allow_tf32, Tensor out,
                    std::optional<Tensor> fringe_pixels, std::optional<Tensor> fringe_count,
                    std::optional<Tensor> packed) {
  run("sparse_conv2d_",
      {x, weight, bias, residual, indices, count, grid, stride, padding, dilation, groups, activation, activation_param,
       allow_tf32},
      out, fringe_pixels, fringe_count, packed);
}

// Zeros outside the active blocks; y has the memory format of x.
Tensor sparse_conv2d(Tensor x, Tensor weight, std::optional<Tensor> bias, std::optional<Tensor> residual,
                     Tensor indices, Tensor count, Tensor block_map, Ints grid, Ints stride, Ints padding,
                     Ints dilation, int64_t groups, std::string activation, double activation_param, bool allow_tf32) {
  const char* op = "sparse_conv2d";
  check_rank(op, "x", x, 4);
  check_batch(op, block_map, x);
  check_rank(op, "weight", weight, 4);
  // Sizes of y before validate() has seen the numbers: 32 bits each, so that nothing overflows.
  int32_t strides[2], paddings[2], dilations[2];
  to_pair(op, "stride", stride, strides);
  to_pair(op, "padding", padding, paddings);
  to_pair(op, "dilation", dilation, dilations);
  int64_t side[2];
  for (int d = 0; d < 2; ++d) {
    SBNET_TORCH_CHECK(strides[d] >= 1 && dilations[d] >= 1 && paddings[d] >= 0, "sbnet::", op,
                      ": stride, dilation, padding: ", strides[d], ", ", dilations[d], ", ", paddings[d],
                      "; at least 1, 1, 0 is wanted");
    const int64_t reach = x.size(2 + d) + 2 * padding[d] - dilation[d] * (weight.size(2 + d) - 1) - 1;
    SBNET_TORCH_CHECK(reach >= 0, "sbnet::", op, ": x: side ", x.size(2 + d), " with padding ", padding[d],
                      " is smaller than the kernel's reach");
    side[d] = reach / stride[d] + 1;
  }
  const BlockGrid blocks = to_grid(op, grid);  // checked before y is made, whose size these numbers decide
  check(check_grid(op, blocks));
  check(check_tiling(op, blocks, side[0], side[1]));
  const bool channels_last = is_channels_last(x);
  const int64_t N = x.size(0), K = weight.size(0);
  const int64_t nchw[4] = {N, K, side[0], side[1]}, nhwc[4] = {N, side[0], side[1], K};
  Tensor y = torch::stable::new_zeros(x, {channels_last ? nhwc : nchw, 4});
  if (channels_last) y = torch::stable::transpose(torch::stable::transpose(y, 2, 3), 1, 2);
  run(op,
      {x, weight, bias, residual, indices, count, grid, stride, padding, dilation, groups, activation, activation_param,
       allow_tf32},
      y);
  return y;
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

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("sparse_conv2d", TORCH_BOX(&sparse_conv2d));
  m.impl("sparse_conv2d_", TORCH_BOX(&sparse_conv2d_));
  m.impl("pack_conv_weight", TORCH_BOX(&pack_conv_weight));
}

}  // namespace
}  // namespace sbnet::binding

SBNET_TORCH_IMPL(sbnet::binding::register_ops)
