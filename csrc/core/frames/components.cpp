#include "core/frames/components.h"

#include "core/grid.h"

namespace sbnet {

Status validate(const ComponentsParams& p) {
  constexpr const char* kOp = "connected_components";
  SBNET_TRY(check_plane(kOp, "scores", p.scores));
  SBNET_CHECK(is_compute_dtype(p.scores.dtype), "%s: scores: dtype: expected float16, bfloat16 or float32, got %s", kOp,
              dtype_name(p.scores.dtype));
  SBNET_CHECK(p.area() <= INT32_MAX / 2 && size_product({p.images(), p.area()}) <= INT64_MAX / 64,
              "%s: scores: expected at most 2^30 pixels an image, got %lldx%lld", kOp,
              static_cast<long long>(p.scores.size[2]), static_cast<long long>(p.scores.size[3]));
  SBNET_CHECK(p.least == p.least, "%s: least: expected a number, got NaN", kOp);
  SBNET_CHECK(p.smallest >= 1 && p.smallest <= INT32_MAX, "%s: smallest: expected 1 to 2^31-1 pixels, got %lld", kOp,
              static_cast<long long>(p.smallest));
  SBNET_CHECK(p.capacity >= 1 && p.capacity <= INT32_MAX / 4, "%s: capacity: expected 1 to 2^29 rows, got %lld", kOp,
              static_cast<long long>(p.capacity));
  return ok_status();
}

}  // namespace sbnet

// Labels, and of each component's first pixel how many it has, then its row; on CUDA how many components a chunk has.
int64_t sbnet_components_workspace_bytes(const sbnet::ComponentsParams* p) {
  const int64_t chunks = p->area() / sbnet::kComponentsChunk + 1;
  return p->images() * (2 * p->area() + chunks) * 4;
}
