#include "core/masked/layer_norm_grad.h"

#include "core/grid.h"

namespace sbnet {

Status validate(const LayerNormGradParams& p) {
  constexpr const char* op = "sparse_layer_norm2d_backward";
  const LayerShape shape = {{p.x.size[0], p.x.size[1], p.x.size[2], p.x.size[3]}, "that of x"};
  SBNET_TRY(check_layer(op, p.x, p.y, shape, p.active, {}));
  SBNET_TRY(check_shape(op, "grad", p.grad, p.x.dtype, shape));
  SBNET_CHECK(!p.x.size[0] || !may_overlap(p.grad, p.y), "%s: out: expected memory of its own, got that of grad", op);
  SBNET_CHECK(p.x.size[1] <= kMostNormChannels, "%s: x: expected at most %lld channels, got %lld", op,
              static_cast<long long>(kMostNormChannels), static_cast<long long>(p.x.size[1]));
  SBNET_CHECK(!p.weight || p.param_dtype == p.x.dtype || p.param_dtype == DType::kF32,
              "%s: weight: dtype: expected that of x, %s, or float32, got %s", op, dtype_name(p.x.dtype),
              dtype_name(p.param_dtype));
  SBNET_CHECK(p.eps >= 0, "%s: eps: expected at least 0, got %g", op, static_cast<double>(p.eps));
  SBNET_CHECK(p.active.block_map || !p.x.size[0], "%s: active: expected a block map, got none", op);
  return ok_status();
}

}  // namespace sbnet

// [parts, 2, C] sums.
int64_t sbnet_sparse_layer_norm2d_backward_workspace_bytes(const sbnet::LayerNormGradParams* p) {
  return sbnet::size_product({sbnet::kMostLayerNormParts, 2, p->x.size[1], 4});
}
