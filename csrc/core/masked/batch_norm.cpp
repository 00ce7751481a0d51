#include "core/masked/batch_norm.h"

#include "core/grid.h"

namespace sbnet {
namespace {

Status check_norm(const char* op, const TensorView& x, const TensorView& y, const ActiveView& active,
                  const void* weight, const void* bias, DType param_dtype, float eps) {
  const LayerShape shape = {{x.size[0], x.size[1], x.size[2], x.size[3]}, "that of x"};
  SBNET_TRY(check_layer(op, x, y, shape, active, {}));
  SBNET_CHECK((!weight && !bias) || param_dtype == x.dtype || param_dtype == DType::kF32,
              "%s: weight, bias: dtype: expected that of x, %s, or float32, got %s", op, dtype_name(x.dtype),
              dtype_name(param_dtype));
  SBNET_CHECK(eps >= 0, "%s: eps: expected at least 0, got %g", op, static_cast<double>(eps));
  SBNET_CHECK(active.block_map || !x.size[0], "%s: active: expected a block map, got none", op);
  return ok_status();
}

}  // namespace

Status validate(const BatchNormParams& p) {
  return check_norm("sparse_batch_norm2d", p.x, p.y, p.active, p.weight, p.bias, p.param_dtype, p.eps);
}

Status validate(const BatchNormGradParams& p) {
  constexpr const char* op = "sparse_batch_norm2d_backward";
  SBNET_TRY(check_norm(op, p.x, p.y, p.active, p.weight, nullptr, p.param_dtype, p.eps));
  const LayerShape shape = {{p.x.size[0], p.x.size[1], p.x.size[2], p.x.size[3]}, "that of x"};
  SBNET_TRY(check_shape(op, "grad", p.grad, p.x.dtype, shape));
  SBNET_CHECK(!p.x.size[0] || !may_overlap(p.grad, p.y), "%s: out: expected memory of its own, got that of grad", op);
  return ok_status();
}

}  // namespace sbnet

// What the parts found, then mean, scale and shift of each channel.
int64_t sbnet_sparse_batch_norm2d_workspace_bytes(const sbnet::BatchNormParams* p) {
  using namespace sbnet;
  if (!p->x.size[0]) return 0;
  const int64_t of_list = size_product({kMostNormParts, 2 * p->x.size[1] + 1, 4});         // a GPU's parts
  const int64_t of_plane = fold_bytes(parts_of(*p, kCudaPartPixels), FoldKind::kMoments);  // no more on a CPU
  return (of_list > of_plane ? of_list : of_plane) + size_product({3, p->x.size[1], 4});
}

// [parts, 2, C] sums of dy and dy (x - mean), in double on a CPU, then four numbers a channel; a CPU's sums of a block.
int64_t sbnet_sparse_batch_norm2d_backward_workspace_bytes(const sbnet::BatchNormGradParams* p) {
  using namespace sbnet;
  return size_product({kMostNormParts * 6 + 4, p->x.size[1], 4});
}
