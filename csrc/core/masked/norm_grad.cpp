#include "core/masked/norm_grad.h"

#include "core/grid.h"

namespace sbnet {

Status validate(const NormGradParams& p) {
  constexpr const char* op = "sparse_norm2d_backward";
  const int64_t C = p.x.size[1];
  const LayerShape shape = {{p.x.size[0], C, p.x.size[2], p.x.size[3]}, "that of x"};
  SBNET_TRY(check_layer(op, p.x, p.y, shape, p.active, p.fringe));
  SBNET_TRY(check_shape(op, "grad", p.grad, p.x.dtype, shape));
  SBNET_CHECK(!p.x.size[0] || !may_overlap(p.grad, p.y), "%s: out: expected memory of its own, got that of grad", op);
  SBNET_CHECK(of_images(p.kind) || p.kind == NormKind::kLayer, "%s: method: expected group, layer or response, got %s",
              op, kNormNames[static_cast<int32_t>(p.kind)]);
  SBNET_CHECK(p.kind != NormKind::kLayer || C <= kMostNormChannels, "%s: x: expected at most %lld channels, got %lld",
              op, static_cast<long long>(kMostNormChannels), static_cast<long long>(C));
  SBNET_CHECK(p.kind != NormKind::kGroup || (p.groups >= 1 && C % p.groups == 0),
              "%s: groups: expected a divisor of %lld channels, got %d", op, static_cast<long long>(C), p.groups);
  SBNET_CHECK(!p.weight || p.param_dtype == p.x.dtype || p.param_dtype == DType::kF32,
              "%s: weight: dtype: expected that of x, %s, or float32, got %s", op, dtype_name(p.x.dtype),
              dtype_name(p.param_dtype));
  SBNET_CHECK(p.eps > 0 || (p.eps == 0 && p.kind != NormKind::kResponse), "%s: eps: expected at least 0, got %g", op,
              static_cast<double>(p.eps));
  SBNET_CHECK(p.active.block_map || !p.x.size[0], "%s: active: expected a block map, got none", op);
  return ok_status();
}

}  // namespace sbnet

int64_t sbnet_sparse_norm2d_backward_workspace_bytes(const sbnet::NormGradParams* p) {
  using namespace sbnet;
  const int64_t C = p->x.size[1];
  if (p->kind == NormKind::kLayer) return size_product({kMostLayerNormParts, 2, C, 4});
  return image_norm_bytes(p->x, p->active.grid, 3, kGradRows, fold_bytes(cuda_parts(*p), FoldKind::kGradient));
}
