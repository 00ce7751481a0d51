#include "core/masked/resize_grad.h"

#include "core/grid.h"

namespace sbnet {

Status validate(const ResizeGradParams& p) {
  constexpr const char* op = "sparse_resize2d_grad";
  const TensorView &dy = p.x, &dx = p.y;
  SBNET_CHECK(is_compute_dtype(dy.dtype), "%s: grad: dtype: expected float32, float16 or bfloat16, got %s", op,
              dtype_name(dy.dtype));
  SBNET_TRY(check_plane(op, "grad", dy));
  SBNET_TRY(check_read(op, dx));
  const ResizeParams forward = p.forward();
  SBNET_TRY(named(op, ResizeLayer::check(forward)));
  for (int d = 2; d < 4; ++d) {
    int64_t side = 0;
    SBNET_TRY(named(op, ResizeLayer::size(forward, d, dx.size[d], &side)));
  }
  SBNET_TRY(check_grid(op, p.read_grid));
  SBNET_TRY(check_tiling(op, p.read_grid, dy.size[2], dy.size[3]));
  SBNET_CHECK(p.read_map || !dy.size[0], "%s: active: expected a block map, got none", op);
  const LayerShape shape = {{dy.size[0], dy.size[1], dx.size[2], dx.size[3]}, "N, C, H, W"};
  if (p.active.given()) return check_layer(op, dy, dx, shape, p.active, p.fringe);
  SBNET_TRY(check_shape(op, "out", dx, dy.dtype, shape));
  SBNET_TRY(check_written(op, "out", dx.size, dx.stride));
  SBNET_CHECK(!dy.size[0] || !may_overlap(dy, dx), "%s: out: expected memory of its own, got that of grad", op);
  return ok_status();
}

}  // namespace sbnet
