#include "core/masked/norm.h"

namespace sbnet {

Status validate(const NormParams& p) {
  constexpr const char* kOp = NormLayer::kName;
  const TensorView& x = p.x;
  SBNET_TRY(check_plain<NormLayer>(p));
  const bool scaled = p.kind == NormKind::kGroup || p.kind == NormKind::kLayer;
  SBNET_CHECK(scaled || (!p.weight && !p.bias), "%s: weight, bias: expected none for a softmax", kOp);
  SBNET_CHECK((!p.weight && !p.bias) || p.param_dtype == x.dtype || p.param_dtype == DType::kF32,
              "%s: weight, bias: dtype: expected that of x, %s, or float32, got %s", kOp, dtype_name(x.dtype),
              dtype_name(p.param_dtype));
  SBNET_CHECK(!scaled || p.eps >= 0, "%s: eps: expected at least 0, got %g", kOp, static_cast<double>(p.eps));
  if (p.kind != NormKind::kGroup) return ok_status();
  SBNET_CHECK(p.groups >= 1 && x.size[1] % p.groups == 0, "%s: groups: expected a divisor of %lld channels, got %d",
              kOp, static_cast<long long>(x.size[1]), p.groups);
  SBNET_CHECK(p.active.block_map || !x.size[0], "%s: active: expected a block map, got none", kOp);
  return ok_status();
}

}  // namespace sbnet

int64_t sbnet_sparse_norm2d_workspace_bytes(const sbnet::NormParams* p) {
  using namespace sbnet;
  // On a CPU the others have their weights and biases there, in float32.
  if (p->kind != NormKind::kGroup) return size_product({2, p->x.size[1], 4});
  const int64_t folds = fold_bytes(cuda_parts(*p), FoldKind::kMoments);
  const int64_t table = size_product({p->x.size[0], 3, p->x.size[1], 4});
  return folds < INT64_MAX - table ? folds + table : INT64_MAX;
}
