#include "core/masked/bottleneck.h"

#include "core/grid.h"
#include "torch_binding/common.h"

namespace sbnet::binding {
namespace {

using Ints = std::vector<int64_t>;
using Bias = std::optional<Tensor>;
using torch::headeronly::MemoryFormat;

struct BottleneckArguments {
  Tensor x, weights[3];
  Bias biases[3];
  Tensor indices, count, block_map;
  Ints grid;
  std::string activation;
  double activation_param;
  bool allow_tf32;
};

void run(const char* op, BottleneckArguments a, const Tensor& out, const std::optional<Tensor>& fringe_pixels = {},
         const std::optional<Tensor>& fringe_count = {}) {
  const Call call(op, "x", a.x);
  call.same_device("out", out);
  BottleneckParams p = {};
  p.x = view4(op, "x", a.x);
  p.bias_dtype = p.x.dtype;
  constexpr const char *kWeights[] = {"weights[0]", "weights[1]", "weights[2]"},
                       *kBiases[] = {"biases[0]", "biases[1]", "biases[2]"};
  for (int k = 0; k < 3; ++k) {
    call.same_device(kWeights[k], a.weights[k]);
    check_rank(op, kWeights[k], a.weights[k], 4);
    // Kernels want K,R,S,C order; weights kept in channels_last skip this copy.
    a.weights[k] = torch::stable::contiguous(a.weights[k], MemoryFormat::ChannelsLast);
    p.weight[k] = view4(op, kWeights[k], a.weights[k]);
  }
  bool any = false;
  for (int k = 0; k < 3; ++k) {
    Bias& bias = a.biases[k];
    if (!bias) continue;
    call.same_device(kBiases[k], *bias);
    SBNET_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == a.weights[k].size(0), "sbnet::", op, ": ", kBiases[k],
                      ": a tensor of ", bias->dim(), " dimensions and ", bias->numel(), " elements; [",
                      a.weights[k].size(0), "] is wanted");
    const DType dtype = to_dtype(op, kBiases[k], *bias);
    SBNET_TORCH_CHECK(!any || dtype == p.bias_dtype, "sbnet::", op, ": ", kBiases[k], ": dtype ", dtype_name(dtype),
                      "; that of the biases before, ", dtype_name(p.bias_dtype), ", is wanted");
    any = true;
    if (!bias->is_contiguous()) bias = torch::stable::contiguous(*bias);
    p.bias[k] = bias->const_data_ptr();
    p.bias_dtype = dtype;
  }
  p.y = view4(op, "out", out);
  p.active = to_active(call, a.indices, a.count, &a.block_map, a.grid, a.x.size(0));
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
  const Parallel parallel = call.parallel();
  const void* const packed[3] = {nullptr, nullptr, nullptr};
  const Tensor scratch =
      workspace(a.x, SBNET_ON_DEVICE(call, sbnet_sparse_bottleneck2d_workspace_bytes_cpu(&p, packed, parallel.threads),
                                     sbnet_sparse_bottleneck2d_workspace_bytes_cuda(&p)));
  check(SBNET_ON_DEVICE(call, sbnet_sparse_bottleneck2d_cpu(&p, packed, scratch.data_ptr(), &parallel),
                        sbnet_sparse_bottleneck2d_cuda(&p, scratch.data_ptr(), call.stream())));
}

void sparse_bottleneck2d_(Tensor x, Tensor weight1, Tensor weight2, Tensor weight3, Bias bias1, Bias bias2, Bias bias3,
                          Tensor indices, Tensor count, Tensor block_map, Ints grid, std::string activation,
                          double activation_param, bool allow_tf32, Tensor out, std::optional<Tensor> fringe_pixels,
                          std::optional<Tensor> fringe_count) {
  const char* op = "sparse_bottleneck2d_";
  check_rank(op, "x", x, 4);
  check_batch(op, block_map, x);
  run(op,
      {x,
       {weight1, weight2, weight3},
       {bias1, bias2, bias3},
       indices,
       count,
       block_map,
       grid,
       activation,
       activation_param,
       allow_tf32},
      out, fringe_pixels, fringe_count);
}

// Zeros outside the active blocks; y has the memory format of x.
Tensor sparse_bottleneck2d(Tensor x, Tensor weight1, Tensor weight2, Tensor weight3, Bias bias1, Bias bias2, Bias bias3,
                           Tensor indices, Tensor count, Tensor block_map, Ints grid, std::string activation,
                           double activation_param, bool allow_tf32) {
  const char* op = "sparse_bottleneck2d";
  check_rank(op, "x", x, 4);
  check_batch(op, block_map, x);
  const bool channels_last = is_channels_last(x);
  const int64_t N = x.size(0), C = x.size(1), H = x.size(2), W = x.size(3);
  const int64_t nchw[4] = {N, C, H, W}, nhwc[4] = {N, H, W, C};
  Tensor y = torch::stable::new_zeros(x, {channels_last ? nhwc : nchw, 4});
  if (channels_last) y = torch::stable::transpose(torch::stable::transpose(y, 2, 3), 1, 2);
  run(op,
      {x,
       {weight1, weight2, weight3},
       {bias1, bias2, bias3},
       indices,
       count,
       block_map,
       grid,
       activation,
       activation_param,
       allow_tf32},
      y);
  return y;
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("sparse_bottleneck2d", TORCH_BOX(&sparse_bottleneck2d));
  m.impl("sparse_bottleneck2d_", TORCH_BOX(&sparse_bottleneck2d_));
}

}  // namespace
}  // namespace sbnet::binding

SBNET_TORCH_IMPL(sbnet::binding::register_ops)
