#include "core/masked/fill.h"

#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

using Grid = std::vector<int64_t>;

void run(const char* op, const Tensor& x, const Tensor& block_map, const Grid& grid, double value, const Tensor& out) {
  const Call call(op, "x", x);
  FillParams p = {};
  p.x = view4(op, "x", x);
  p.y = view4(op, "out", out);
  p.grid = to_grid(op, grid);
  p.block_map = call.int32("block_map", block_map, blocks_of(p.grid, x.size(0)));
  p.value = static_cast<float>(value);
  check(op, SBNET_KERNELS(sparse_fill)(call, &p));
}

Tensor sparse_fill(Tensor x, Tensor block_map, Grid grid, double value) {
  Tensor y = torch::stable::empty_like(x);
  run("sparse_fill", x, block_map, grid, value, y);
  return y;
}

void sparse_fill_(Tensor x, Tensor block_map, Grid grid, double value) {
  run("sparse_fill_", x, block_map, grid, value, x);
}

SBNET_TORCH_OPS(ops) {
  ops.add("sparse_fill(Tensor x, Tensor block_map, SymInt[] grid, float value) -> Tensor", TORCH_BOX(&sparse_fill));
  ops.add("sparse_fill_(Tensor(a!) x, Tensor block_map, SymInt[] grid, float value) -> ()", TORCH_BOX(&sparse_fill_));
}

}  // namespace
}  // namespace sbnet::binding
