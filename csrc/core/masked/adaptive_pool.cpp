#include "core/masked/adaptive_pool.h"

#include <algorithm>

#include "core/grid.h"
#include "core/layer.h"

namespace sbnet {
namespace {
constexpr const char* kOp = "sparse_adaptive_pool2d";
}

Status read_adaptive_pool_kind(const char* op, const char* name, AdaptivePoolKind* kind) {
  constexpr const char* kNames[] = {"avg", "max"};
  return read_choice(op, "mode", kNames, name, kind);
}

Status validate(const AdaptivePoolParams& p) {
  const TensorView &x = p.x, &y = p.y;
  SBNET_TRY(check_input(kOp, x));
  constexpr int64_t kMostSide = 4096;
  for (int d = 2; d < 4; ++d)
    SBNET_CHECK(y.size[d] >= 1 && y.size[d] <= kMostSide, "%s: output_size: expected 1 to %lld, got %lld", kOp,
                static_cast<long long>(kMostSide), static_cast<long long>(y.size[d]));
  SBNET_TRY(check_shape(kOp, "out", y, x.dtype, {{x.size[0], x.size[1], y.size[2], y.size[3]}, "N, C, H_out, W_out"}));
  SBNET_TRY(check_written(kOp, "out", y.size, y.stride));
  SBNET_CHECK(!x.size[0] || !may_overlap(x, y), "%s: out: expected memory of its own, got that of x", kOp);
  SBNET_TRY(check_grid(kOp, p.grid));
  SBNET_TRY(check_tiling(kOp, p.grid, x.size[2], x.size[3]));
  SBNET_CHECK(p.block_map || !x.size[0], "%s: active: expected a block map, got none", kOp);
  return ok_status();
}

}  // namespace sbnet

int64_t sbnet_sparse_adaptive_pool2d_workspace_bytes(const sbnet::AdaptivePoolParams* p) {
  using namespace sbnet;
  return std::max(fold_bytes(cuda_parts(*p), fold_kind(*p)), image_fold_bytes(p->x));
}
