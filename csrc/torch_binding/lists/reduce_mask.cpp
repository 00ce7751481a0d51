#include "core/lists/reduce_mask.h"

#include "torch_binding/common.h"

namespace sbnet::binding {
namespace {

using Grid = std::vector<int64_t>;

std::tuple<Tensor, Tensor, Tensor, Tensor> reduce_mask(Tensor mask, Grid grid, double tol, bool avgpool,
                                                       int64_t capacity) {
  const char* op = "reduce_mask";
  const Call call(op, "mask", mask);
  check_rank(op, "mask", mask, 3);
  ReduceMaskParams p = {};
  p.mask = mask.const_data_ptr();
  p.mask_dtype = to_dtype(op, "mask", mask);
  for (int d = 0; d < 3; ++d) p.size[d] = mask.size(d), p.stride[d] = mask.stride(d);
  p.grid = to_grid(op, grid);
  p.tol = tol;
  p.avgpool = avgpool;
  p.capacity = capacity;
  check(validate(p));
  Tensor indices = empty_int32(mask, {capacity, 3}), count = empty_int32(mask, {1}), total = empty_int32(mask, {1}),
         block_map = empty_int32(mask, {mask.size(0), p.grid.count[0], p.grid.count[1]});
  p.indices = static_cast<int32_t*>(indices.data_ptr());
  p.count = static_cast<int32_t*>(count.data_ptr());
  p.total = static_cast<int32_t*>(total.data_ptr());
  p.block_map = static_cast<int32_t*>(block_map.data_ptr());
  const Tensor scratch = workspace(mask, sbnet_reduce_mask_workspace_bytes(&p));
  check(SBNET_KERNELS(reduce_mask)(call, &p, scratch.data_ptr()));
  return {indices, count, total, block_map};
}

SBNET_TORCH_OPS(ops) {
  ops.add(
      "reduce_mask(Tensor mask, SymInt[] grid, float tol, bool avgpool, SymInt capacity) -> (Tensor indices, Tensor "
      "count, Tensor total, Tensor block_map)",
      TORCH_BOX(&reduce_mask));
}

}  // namespace
}  // namespace sbnet::binding
