#include "core/masked/fill.h"

#include "core/grid.h"

namespace sbnet {

Status validate(const FillParams& p) {
  constexpr const char* kOp = "sparse_fill";
  const bool bytes = p.x.dtype == DType::kI8 || p.x.dtype == DType::kF8;
  const bool zeros = bytes && p.value == 0;  // what layers of int8 and float8 leave outside
  SBNET_CHECK(is_compute_dtype(p.x.dtype) || zeros,
              "%s: x: dtype: expected float32, float16 or bfloat16, or int8 or float8_e4m3fn with the value 0, got %s",
              kOp, dtype_name(p.x.dtype));
  SBNET_CHECK(p.y.dtype == p.x.dtype, "%s: out: dtype: expected that of x, %s, got %s", kOp, dtype_name(p.x.dtype),
              dtype_name(p.y.dtype));
  SBNET_TRY(check_plane(kOp, "x", p.x));
  SBNET_TRY(check_plane(kOp, "out", p.y));
  bool same_strides = true;
  for (int d = 0; d < 4; ++d) {
    SBNET_CHECK(p.y.size[d] == p.x.size[d], "%s: out: shape: expected that of x, %lld in dimension %d, got %lld", kOp,
                static_cast<long long>(p.x.size[d]), d, static_cast<long long>(p.y.size[d]));
    same_strides = same_strides && p.x.stride[d] == p.y.stride[d];
  }
  SBNET_TRY(check_written(kOp, "out", p.y.size, p.y.stride));
  SBNET_CHECK(p.in_place() ? same_strides : !may_overlap(p.x, p.y),
              "%s: out: expected x itself or memory apart from it, got memory that overlaps it", kOp);
  SBNET_TRY(check_grid(kOp, p.grid));
  SBNET_TRY(check_tiling(kOp, p.grid, p.x.size[2], p.x.size[3]));
  SBNET_CHECK(p.block_map || !p.x.size[0] || !p.grid.count[0] || !p.grid.count[1],
              "%s: active: expected a block map, got none", kOp);
  return ok_status();
}

}  // namespace sbnet
