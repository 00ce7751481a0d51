#include "core/masked/pool.h"

#include "core/grid.h"
#include "torch_binding/common.h"

namespace sbnet::binding {
namespace {

using Ints = std::vector<int64_t>;
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

void run(const char* op, PoolParams p, const Tensor& x, const Tensor& indices, const Tensor& count, const Ints& grid,
         const Tensor& out, const std::optional<Tensor>& fringe_pixels, const std::optional<Tensor>& fringe_count) {
  const Call call(op, "x", x);
  call.same_device("out", out);
  p.x = view4(op, "x", x);
  p.y = view4(op, "out", out);
  p.active = to_active(call, indices, count, nullptr, grid, x.size(0));
  SBNET_TORCH_CHECK(fringe_pixels.has_value() == fringe_count.has_value(), "sbnet::", op,
                    ": fringe: pixels and count go together");
  if (fringe_pixels) {
    p.fringe.capacity = fringe_pixels->numel();
    p.fringe.pixels = call.int32("fringe", *fringe_pixels, p.fringe.capacity);
    p.fringe.count = call.int32("fringe", *fringe_count, 1);
  }
  const Parallel parallel = call.parallel();
  check(SBNET_ON_DEVICE(call, sbnet_sparse_pool2d_cpu(&p, &parallel), sbnet_sparse_pool2d_cuda(&p, call.stream())));
}

// Zeros outside the active blocks; y has the memory format of x.
Tensor run_functional(const char* op, const PoolParams& p, const Tensor& x, const Tensor& indices, const Tensor& count,
                      const Tensor& block_map, const Ints& grid) {
  check_rank(op, "x", x, 4);
  check_batch(op, block_map, x);
  check(check_pool_window(p));
  int64_t side[2];
  for (int d = 0; d < 2; ++d) {
    side[d] = pool_output_side(x.size(2 + d), p.kernel[d], p.stride[d], p.padding[d], p.dilation[d], p.ceil_mode);
    SBNET_TORCH_CHECK(side[d] >= 1, "sbnet::", op, ": x: side ", x.size(2 + d), " with padding ", p.padding[d],
                      " is smaller than the kernel's reach");
  }
  const BlockGrid blocks = to_grid(op, grid);  // checked before y is made, whose size these numbers decide
  check(check_grid(op, blocks));
  check(check_tiling(op, blocks, side[0], side[1]));
  const bool channels_last = is_channels_last(x);
  const int64_t N = x.size(0), C = x.size(1);
  const int64_t nchw[4] = {N, C, side[0], side[1]}, nhwc[4] = {N, side[0], side[1], C};
  Tensor y = torch::stable::new_zeros(x, {channels_last ? nhwc : nchw, 4});
  if (channels_last) y = torch::stable::transpose(torch::stable::transpose(y, 2, 3), 1, 2);
  run(op, p, x, indices, count, grid, y, std::nullopt, std::nullopt);
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
  run(op, geometry(op, PoolKind::kMax, kernel, stride, padding, dilation, ceil_mode), x, indices, count, grid, out,
      fringe_pixels, fringe_count);
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
  run(op, average_geometry(op, kernel, stride, padding, ceil_mode, count_include_pad, divisor), x, indices, count, grid,
      out, fringe_pixels, fringe_count);
}

void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("sparse_max_pool2d", TORCH_BOX(&sparse_max_pool2d));
  m.impl("sparse_max_pool2d_", TORCH_BOX(&sparse_max_pool2d_));
  m.impl("sparse_avg_pool2d", TORCH_BOX(&sparse_avg_pool2d));
  m.impl("sparse_avg_pool2d_", TORCH_BOX(&sparse_avg_pool2d_));
}

}  // namespace
}  // namespace sbnet::binding

SBNET_TORCH_IMPL(sbnet::binding::register_ops)
