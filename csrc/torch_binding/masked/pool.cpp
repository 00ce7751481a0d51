#include "core/masked/pool.h"

#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

using Divisor = std::optional<int64_t>;

// Everything but tensors.
PoolParams geometry(const char* op, PoolKind kind, const Ints& kernel, const Ints& stride, const Ints& padding,
                    const Ints& dilation, bool ceil_mode) {
  PoolParams p = {};
  p.kind = kind;
  to_pair(op, "kernel_size", kernel, p.kernel);
  to_pair(op, "stride", stride, p.stride);
  to_pair(op, "padding", padding, p.padding);
  to_pair(op, "dilation", dilation, p.dilation);
  p.ceil_mode = ceil_mode;
  return p;
}
PoolParams average_geometry(const char* op, const Ints& kernel, const Ints& stride, const Ints& padding, bool ceil_mode,
                            bool count_include_pad, Divisor divisor) {
  PoolParams p = geometry(op, PoolKind::kAverage, kernel, stride, padding, {1, 1}, ceil_mode);
  p.count_include_pad = count_include_pad;
  SBNET_TORCH_CHECK(!divisor || *divisor != 0, "sbnet::", op, ": divisor_override: 0; anything else is wanted");
  p.divisor_override = to_int32(op, "divisor_override", divisor.value_or(0));
  return p;
}

void run(const LayerCall& layer, PoolParams p) {
  const Call call(layer.op, "x", layer.x);
  set_layer(call, layer, &p);
  const auto kernel = [=](void*, const Parallel& parallel) { return sbnet_sparse_pool2d_cpu(&p, &parallel); };
  check(layer.op, SBNET_ON_DEVICE(call, run_on_cpu(layer.op, nullptr, kernel, layer),
                                  sbnet_sparse_pool2d_cuda(&p, call.stream())));
}

// Zeros outside the active blocks; y has the memory format of x.
Tensor run_functional(const char* op, const PoolParams& p, const Tensor& x, const Tensor& indices, const Tensor& count,
                      const Tensor& block_map, const Ints& grid) {
  check_rank(op, "x", x, 4);
  check(check_pool_window(p));
  int64_t side[2];
  for (int d = 0; d < 2; ++d) {
    side[d] = pool_output_side(x.size(2 + d), p.kernel[d], p.stride[d], p.padding[d], p.dilation[d], p.ceil_mode);
    SBNET_TORCH_CHECK(side[d] >= 1, "sbnet::", op, ": x: side ", x.size(2 + d), " with padding ", p.padding[d],
                      " is smaller than the kernel's reach");
  }
  const Tensor y = zeros_for(op, x, x.size(1), side, block_map, grid);
  run({op, x, indices, count, grid, y}, p);
  return y;
}

Tensor sparse_max_pool2d(Tensor x, Tensor indices, Tensor count, Tensor block_map, Ints grid, Ints kernel, Ints stride,
                         Ints padding, Ints dilation, bool ceil_mode) {
  const char* op = "sparse_max_pool2d";
  return run_functional(op, geometry(op, PoolKind::kMax, kernel, stride, padding, dilation, ceil_mode), x, indices,
                        count, block_map, grid);
}

void sparse_max_pool2d_(Tensor x, Tensor indices, Tensor count, Ints grid, Ints kernel, Ints stride, Ints padding,
                        Ints dilation, bool ceil_mode, Tensor out, std::optional<Tensor> fringe_pixels,
                        std::optional<Tensor> fringe_count) {
  const char* op = "sparse_max_pool2d_";
  run({op, x, indices, count, grid, out, fringe_pixels, fringe_count},
      geometry(op, PoolKind::kMax, kernel, stride, padding, dilation, ceil_mode));
}

Tensor sparse_avg_pool2d(Tensor x, Tensor indices, Tensor count, Tensor block_map, Ints grid, Ints kernel, Ints stride,
                         Ints padding, bool ceil_mode, bool count_include_pad, Divisor divisor) {
  const char* op = "sparse_avg_pool2d";
  return run_functional(op, average_geometry(op, kernel, stride, padding, ceil_mode, count_include_pad, divisor), x,
                        indices, count, block_map, grid);
}

void sparse_avg_pool2d_(Tensor x, Tensor indices, Tensor count, Ints grid, Ints kernel, Ints stride, Ints padding,
                        bool ceil_mode, bool count_include_pad, Divisor divisor, Tensor out,
                        std::optional<Tensor> fringe_pixels, std::optional<Tensor> fringe_count) {
  const char* op = "sparse_avg_pool2d_";
  run({op, x, indices, count, grid, out, fringe_pixels, fringe_count},
      average_geometry(op, kernel, stride, padding, ceil_mode, count_include_pad, divisor));
}

void list_ops(OpList& ops) {
  ops.add(
      "sparse_max_pool2d(Tensor x, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, SymInt[] "
      "kernel_size, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool ceil_mode) -> Tensor",
      TORCH_BOX(&sparse_max_pool2d));
  ops.add(
      "sparse_max_pool2d_(Tensor x, Tensor indices, Tensor count, SymInt[] grid, SymInt[] kernel_size, SymInt[] "
      "stride, SymInt[] padding, SymInt[] dilation, bool ceil_mode, Tensor(a!) out, Tensor? fringe_pixels, Tensor? "
      "fringe_count) -> ()",
      TORCH_BOX(&sparse_max_pool2d_));
  ops.add(
      "sparse_avg_pool2d(Tensor x, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, SymInt[] "
      "kernel_size, SymInt[] stride, SymInt[] padding, bool ceil_mode, bool count_include_pad, int? divisor_override) "
      "-> Tensor",
      TORCH_BOX(&sparse_avg_pool2d));
  ops.add(
      "sparse_avg_pool2d_(Tensor x, Tensor indices, Tensor count, SymInt[] grid, SymInt[] kernel_size, SymInt[] "
      "stride, SymInt[] padding, bool ceil_mode, bool count_include_pad, int? divisor_override, Tensor(a!) out, "
      "Tensor? fringe_pixels, Tensor? fringe_count) -> ()",
      TORCH_BOX(&sparse_avg_pool2d_));
}

}  // namespace
}  // namespace sbnet::binding

SBNET_TORCH_OPS(sbnet::binding::list_ops)
