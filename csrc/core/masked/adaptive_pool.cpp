#include "core/masked/adaptive_pool.h"

#include <cstring>

#include "core/grid.h"
#include "core/layer.h"

namespace sbnet {
namespace {
constexpr const char* kOp = "sparse_adaptive_pool2d";
}

Status read_adaptive_pool_kind(const char* op, const char* name, AdaptivePoolKind* kind) {
  const bool max = !std::strcmp(name, "max");
  SBNET_CHECK(max || !std::strcmp(name, "avg"), "%s: mode: expected avg or max, got '%.64s'", op, name);
  *kind = max ? AdaptivePoolKind::kMax : AdaptivePoolKind::kAverage;
  return ok_status();
}

Status validate(const AdaptivePoolParams& p) {
  const TensorView &x = p.x, &y = p.y;
  SBNET_TRY(check_input(kOp, x));
  constexpr int64_t kMostSide = 4096;
  for (int d = 2; d < 4; ++d)
    SBNET_CHECK(y.size[d] >= 1 && y.size[d] <= kMostSide, "%s: output_size: expected 1 to %lld, got %lld", kOp,
                static_cast<long long>(kMostSide), static_cast<long long>(y.size[d]));
  SBNET_TRY(check_shape(kOp, "out", y, x.dtype, {{x.size[0], x.size[1], y.size[2], y.size[3]}, "N, C, H_out, W_out"}));
  for (int d = 0; d < 4; ++d)
    SBNET_CHECK(y.stride[d] > 0 || y.size[d] <= 1,
                "%s: out: expected a tensor of its own memory, got an expanded one (stride 0 in dimension %d)", kOp, d);
  SBNET_CHECK(!x.size[0] || !may_overlap(x, y), "%s: out: shares memory with x; expected memory of its own", kOp);
  SBNET_TRY(check_grid(kOp, p.grid));
  SBNET_TRY(check_tiling(kOp, p.grid, x.size[2], x.size[3]));
  SBNET_CHECK(p.block_map || !x.size[0], "%s: active: expected a block map, got none", kOp);
  return ok_status();
}

}  // namespace sbnet

int64_t sbnet_sparse_adaptive_pool2d_workspace_bytes(const sbnet::AdaptivePoolParams* p) {
  return sbnet::fold_bytes(sbnet::parts_of(*p), sbnet::fold_kind(*p));
}
