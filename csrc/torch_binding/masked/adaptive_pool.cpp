#include "core/masked/adaptive_pool.h"

#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

AdaptivePoolParams read(const Call& call, const Tensor& x, const Tensor& block_map, const Ints& grid,
                        const std::string& mode, bool count_inactive) {
  const char* op = call.op();
  AdaptivePoolParams p = {};
  check(read_adaptive_pool_kind(op, mode.c_str(), &p.kind));
  p.x = view4(op, "x", x);
  p.grid = to_grid(op, grid);
  check(check_grid(op, p.grid));
  p.block_map = call.int32("block_map", block_map, blocks_of(p.grid, x.size(0)));
  p.count_inactive = count_inactive;
  return p;
}

void run(const Call& call, const AdaptivePoolParams& p, const Tensor& x, const Tensor& block_map, const Tensor& out) {
  check(call.op(), validate(p));
  const Tensor scratch = workspace(x, sbnet_sparse_adaptive_pool2d_workspace_bytes(&p));
  check(call.op(), run_in(call, SBNET_KERNELS(sparse_adaptive_pool2d), p, scratch, x, block_map, out));
}

Tensor sparse_adaptive_pool2d(Tensor x, Tensor block_map, Ints grid, Ints output_size, std::string mode,
                              bool count_inactive) {
  const char* op = "sparse_adaptive_pool2d";
  const Call call(op, "x", x);
  check_rank(op, "x", x, 4);
  AdaptivePoolParams p = read(call, x, block_map, grid, mode, count_inactive);
  int32_t side[2];
  to_pair(op, "output_size", output_size, side);
  // Channels last, whose strides a size of 1 x 1 says in either format.
  p.y = {nullptr, {x.size(0), x.size(1), side[0], side[1]}, {1, 1, 1, 1}, p.x.dtype};
  check(op, validate(p));  // before an output of an absurd size is asked for
  const Tensor y = empty4(x, {x.size(0), x.size(1), side[0], side[1]}, true);
  p.y = view4(op, "out", y);
  run(call, p, x, block_map, y);
  return y;
}

void sparse_adaptive_pool2d_(Tensor x, Tensor block_map, Ints grid, std::string mode, bool count_inactive, Tensor out) {
  const char* op = "sparse_adaptive_pool2d_";
  const Call call(op, "x", x);
  check_rank(op, "x", x, 4);
  AdaptivePoolParams p = read(call, x, block_map, grid, mode, count_inactive);
  call.same_device("out", out);
  p.y = view4(op, "out", out);
  run(call, p, x, block_map, out);
}

SBNET_TORCH_OPS(ops) {
  // Blocks of x's plane; all of the output is written.
  ops.add(
      "sparse_adaptive_pool2d(Tensor x, Tensor block_map, SymInt[] grid, SymInt[] output_size, str method, bool "
      "count_inactive) -> Tensor",
      TORCH_BOX(&sparse_adaptive_pool2d));
  ops.add(
      "sparse_adaptive_pool2d_(Tensor x, Tensor block_map, SymInt[] grid, str method, bool count_inactive, Tensor(a!) "
      "out) -> ()",
      TORCH_BOX(&sparse_adaptive_pool2d_));
}

}  // namespace
}  // namespace sbnet::binding
