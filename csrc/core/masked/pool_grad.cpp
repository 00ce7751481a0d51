#include "core/masked/pool_grad.h"

#include "core/grid.h"

namespace sbnet {

Status validate(const PoolGradParams& params) {
  constexpr const char* op = "sparse_pool2d_grad";
  const PoolParams& p = params.pool;
  SBNET_TRY(check_input(op, p.x));
  SBNET_TRY(named(op, PoolLayer::check(p)));
  LayerShape y = {{p.x.size[0], p.x.size[1], 0, 0}, "N, C, H_out, W_out"};
  for (int d = 2; d < 4; ++d) SBNET_TRY(named(op, PoolLayer::size(p, d, p.x.size[d], &y.size[d])));
  SBNET_TRY(check_shape(op, "grad", p.y, p.x.dtype, y));
  SBNET_TRY(check_plane(op, "grad", p.y));
  const LayerShape x = {{p.x.size[0], p.x.size[1], p.x.size[2], p.x.size[3]}, "that of x"};
  SBNET_TRY(check_shape(op, "out", params.dx, p.x.dtype, x));
  SBNET_TRY(check_written(op, "out", params.dx.size, params.dx.stride));
  SBNET_CHECK(!p.x.size[0] || !(may_overlap(p.x, params.dx) || may_overlap(p.y, params.dx)),
              "%s: out: expected memory of its own, got that of x or grad", op);
  if (params.dx_map) {
    SBNET_TRY(check_grid(op, params.dx_grid));
    SBNET_TRY(check_tiling(op, params.dx_grid, p.x.size[2], p.x.size[3]));
  }
  SBNET_TRY(check_grid(op, p.active.grid));
  SBNET_TRY(check_tiling(op, p.active.grid, p.y.size[2], p.y.size[3]));
  SBNET_CHECK(p.active.block_map || !p.x.size[0], "%s: active: expected a block map, got none", op);
  return ok_status();
}

}  // namespace sbnet
