#include "core/masked/activation_grad.h"

#include "core/grid.h"

namespace sbnet {

Status validate(const ActivationGradParams& p) {
  constexpr const char* op = "sparse_activation_grad";
  const TensorView& g = p.grad;
  SBNET_CHECK(is_compute_dtype(g.dtype), "%s: grad: dtype: expected float32, float16 or bfloat16, got %s", op,
              dtype_name(g.dtype));
  SBNET_TRY(check_plane(op, "grad", g));
  const LayerShape shape = {{g.size[0], g.size[1], g.size[2], g.size[3]}, "that of grad"};
  SBNET_TRY(check_shape(op, "z", p.x, g.dtype, shape));
  SBNET_TRY(check_shape(op, "out", p.y, g.dtype, shape));
  SBNET_TRY(check_written(op, "out", p.y.size, p.y.stride));
  SBNET_CHECK(!g.size[0] || !(may_overlap(g, p.y) || may_overlap(p.x, p.y)),
              "%s: out: expected memory of its own, got that of grad or z", op);
  SBNET_TRY(check_epilogue(op, g.dtype, nullptr, DType::kF32, p.activation, p.slope, p.slope_dtype));
  SBNET_TRY(check_grid(op, p.active.grid));
  SBNET_TRY(check_tiling(op, p.active.grid, g.size[2], g.size[3]));
  if (p.active.given()) return check_active(op, p.active);
  SBNET_CHECK(p.active.block_map || !g.size[0], "%s: active: expected a block map, got none", op);
  return ok_status();
}

Status validate(const ActivationParams& p) {
  constexpr const char* op = "activate_blocks_";
  SBNET_CHECK(is_compute_dtype(p.y.dtype), "%s: x: dtype: expected float32, float16 or bfloat16, got %s", op,
              dtype_name(p.y.dtype));
  SBNET_TRY(check_plane(op, "x", p.y));
  SBNET_TRY(check_written(op, "x", p.y.size, p.y.stride));
  if (p.other.data) {
    const LayerShape shape = {{p.y.size[0], p.y.size[1], p.y.size[2], p.y.size[3]}, "that of x"};
    SBNET_TRY(check_shape(op, "other", p.other, p.y.dtype, shape));
    SBNET_CHECK(!p.y.size[0] || !may_overlap(p.other, p.y), "%s: other: expected memory apart from x, got that of x",
                op);
  }
  SBNET_TRY(check_epilogue(op, p.y.dtype, nullptr, DType::kF32, p.activation));
  SBNET_TRY(check_grid(op, p.active.grid));
  SBNET_TRY(check_tiling(op, p.active.grid, p.y.size[2], p.y.size[3]));
  SBNET_CHECK(p.active.block_map || !p.y.size[0], "%s: active: expected a block map, got none", op);
  return ok_status();
}

}  // namespace sbnet
