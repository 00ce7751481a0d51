#include "core/masked/gather_scatter.h"

#include "core/grid.h"

namespace sbnet {

Status validate(const BlockCopyParams& p) {
  const bool gather = p.direction == CopyDirection::kGather;
  const char* op = gather ? "sparse_gather" : "sparse_scatter";
  const char* plane_name = gather ? "x" : "base";
  SBNET_TRY(check_plane(op, plane_name, p.plane));
  SBNET_TRY(check_plane(op, "blocks", p.blocks));
  SBNET_TRY(check_active(op, p.active));
  const BlockGrid& g = p.active.grid;
  SBNET_CHECK(p.blocks.dtype == p.plane.dtype, "%s: blocks: dtype: expected that of %s, %s, got %s", op, plane_name,
              dtype_name(p.plane.dtype), dtype_name(p.blocks.dtype));
  SBNET_CHECK(p.blocks.size[1] == p.plane.size[1] && p.blocks.size[2] == g.size[0] && p.blocks.size[3] == g.size[1],
              "%s: blocks: shape: expected [rows,%lld,%d,%d] (channels of %s, block size of the grid), got "
              "[%lld,%lld,%lld,%lld]",
              op, static_cast<long long>(p.plane.size[1]), g.size[0], g.size[1], plane_name,
              static_cast<long long>(p.blocks.size[0]), static_cast<long long>(p.blocks.size[1]),
              static_cast<long long>(p.blocks.size[2]), static_cast<long long>(p.blocks.size[3]));
  SBNET_CHECK(p.blocks.size[0] <= p.active.capacity,
              "%s: blocks: expected at most the capacity of active, %lld rows, got %lld", op,
              static_cast<long long>(p.active.capacity), static_cast<long long>(p.blocks.size[0]));
  const int64_t block_elements = size_product({p.plane.size[1], g.size[0], g.size[1]});
  SBNET_CHECK(block_elements <= INT32_MAX / 2, "%s: blocks: expected at most 2^30 elements a block, got %lld", op,
              static_cast<long long>(block_elements));
  if (!gather) {
    SBNET_CHECK(!p.add || is_compute_dtype(p.plane.dtype),
                "%s: add: dtype: expected float32, float16 or bfloat16, got %s", op, dtype_name(p.plane.dtype));
    SBNET_CHECK(p.add || !g.overlaps(),
                "%s: grid: expected blocks that do not overlap (or add=True), got size (%d,%d) at stride (%d,%d)", op,
                g.size[0], g.size[1], g.stride[0], g.stride[1]);
    const bool no_blocks = p.plane.size[0] == 0 || g.count[0] == 0 || g.count[1] == 0;
    SBNET_CHECK(!p.add || p.atomic || !g.overlaps() || no_blocks || p.active.block_map,
                "%s: active: expected a block map for overlapping blocks with atomic=False, got none", op);
    SBNET_TRY(check_written(op, "base", p.plane.size, p.plane.stride));
  }
  SBNET_CHECK(!may_overlap(p.plane, p.blocks), "%s: blocks: expected memory of its own, got that of %s", op,
              plane_name);
  return ok_status();
}

}  // namespace sbnet
