#include "core/masked/norm.h"

namespace sbnet {

Status validate(const NormParams& p) {
  constexpr const char* kOp = NormLayer::kName;
  const TensorView& x = p.x;
  SBNET_TRY(check_plain<NormLayer>(p));
  const bool scaled = of_images(p.kind) || p.kind == NormKind::kLayer;
  SBNET_CHECK(scaled || (!p.weight && !p.bias), "%s: weight, bias: expected none for a softmax", kOp);
  SBNET_CHECK((!p.weight && !p.bias) || p.param_dtype == x.dtype || p.param_dtype == DType::kF32,
              "%s: weight, bias: dtype: expected that of x, %s, or float32, got %s", kOp, dtype_name(x.dtype),
              dtype_name(p.param_dtype));
  SBNET_CHECK(!scaled || p.eps >= 0, "%s: eps: expected at least 0, got %g", kOp, static_cast<double>(p.eps));
  SBNET_CHECK(p.kind != NormKind::kResponse || p.eps > 0, "%s: eps: expected more than 0, got 0", kOp);
  SBNET_CHECK(!of_images(p.kind) || p.active.block_map || !x.size[0], "%s: active: expected a block map, got none",
              kOp);
  if (p.kind != NormKind::kGroup) return ok_status();
  SBNET_CHECK(p.groups >= 1 && x.size[1] % p.groups == 0, "%s: groups: expected a divisor of %lld channels, got %d",
              kOp, static_cast<long long>(x.size[1]), p.groups);
  return ok_status();
}

int64_t image_norm_bytes(const TensorView& x, const BlockGrid& grid, int sums, int rows, int64_t folds) {
  const int64_t blocks = int64_t{grid.count[0]} * grid.count[1];
  const int64_t parts = blocks < kMostImageParts ? blocks : kMostImageParts;
  const int64_t found = size_product({x.size[0], parts, sums, x.size[1], 4});
  const int64_t most = folds > found ? folds : found, table = size_product({x.size[0], rows, x.size[1], 4});
  return most < INT64_MAX - table - 32 ? most + table + 32 : INT64_MAX;
}

}  // namespace sbnet

int64_t sbnet_sparse_norm2d_workspace_bytes(const sbnet::NormParams* p) {
  using namespace sbnet;
  // On a CPU the others have their weights and biases there, in float32.
  if (!of_images(p->kind)) return size_product({2, p->x.size[1], 4});
  return image_norm_bytes(p->x, p->active.grid, 1, 3, fold_bytes(cuda_parts(*p), FoldKind::kMoments));
}
