#include "core/weights/matmul.h"

#include <initializer_list>

#include "core/grid.h"

namespace sbnet {
namespace {

Status check_dtype(const char* op, DType t) {
  SBNET_CHECK(is_compute_dtype(t), "%s: x: expected float32, float16 or bfloat16, got %s", op, dtype_name(t));
  return ok_status();
}

// [N, features, H, W] of x's dtype, rows those of x.
Status check_matrix(const char* op, const char* name, const TensorView& t, int64_t features, const TensorView& x) {
  SBNET_TRY(check_plane(op, name, t));
  SBNET_CHECK(t.dtype == x.dtype, "%s: %s: expected %s, the dtype of x, got %s", op, name, dtype_name(x.dtype),
              dtype_name(t.dtype));
  SBNET_CHECK(t.size[1] == features, "%s: %s: expected %lld features, got %lld", op, name,
              static_cast<long long>(features), static_cast<long long>(t.size[1]));
  for (int d : {0, 2, 3})
    SBNET_CHECK(t.size[d] == x.size[d], "%s: %s: expected the %lld x %lld x %lld rows of x, got %lld x %lld x %lld", op,
                name, static_cast<long long>(x.size[0]), static_cast<long long>(x.size[2]),
                static_cast<long long>(x.size[3]), static_cast<long long>(t.size[0]), static_cast<long long>(t.size[2]),
                static_cast<long long>(t.size[3]));
  const double rows = static_cast<double>(t.size[0]) * t.size[2] * t.size[3];
  SBNET_CHECK(rows <= (1 << 30), "%s: %s: expected at most 2^30 rows, got %.0f", op, name, rows);
  return ok_status();
}

Status check_layout(const char* op, const BlockLayoutView& layout) {
  SBNET_TRY(validate(op, layout.shape));
  SBNET_CHECK(layout.column_start && layout.row_start &&
                  (!layout.shape.blocks || (layout.coords && layout.column_entries && layout.row_entries)),
              "%s: layout: expected tables, got none", op);
  return ok_status();
}

Status check_pixels(const char* op, const ActiveView& active, const TensorView& t) {
  if (!active.given()) return ok_status();
  SBNET_TRY(check_active(op, active));
  return check_tiling(op, active.grid, t.size[2], t.size[3]);
}

// The weights as a view, for may_overlap.
TensorView flat(const void* data, const BlockLayoutShape& s, DType dtype) {
  const int64_t block = int64_t{s.block_size} * s.block_size;
  return {const_cast<void*>(data), {1, 1, s.blocks, block}, {0, 0, block, 1}, dtype};
}

}  // namespace

Status validate(const BlocksparseMatmulParams& p) {
  constexpr const char* op = "blocksparse_matmul";
  SBNET_TRY(check_dtype(op, p.x.dtype));
  SBNET_TRY(check_layout(op, p.layout));
  SBNET_TRY(check_matrix(op, "x", p.x, p.in_features(), p.x));
  SBNET_TRY(check_matrix(op, "out", p.y, p.out_features(), p.x));
  SBNET_CHECK(p.weight || !p.layout.shape.blocks, "%s: weight: expected %lld blocks, got none", op,
              static_cast<long long>(p.layout.shape.blocks));
  SBNET_TRY(check_epilogue(op, p.x.dtype, p.bias, p.bias_dtype, p.activation));
  SBNET_CHECK(p.plan_words >= 0 && (p.plan || !p.plan_words), "%s: plan: expected an address, got none for %lld words",
              op, static_cast<long long>(p.plan_words));
  SBNET_TRY(check_written(op, "out", p.y.size, p.y.stride));
  SBNET_CHECK(!may_overlap(p.x, p.y), "%s: out: expected a separate tensor, got memory of x", op);
  SBNET_CHECK(!may_overlap(flat(p.weight, p.layout.shape, p.x.dtype), p.y),
              "%s: out: expected a separate tensor, got memory of weight", op);
  return check_pixels(op, p.active, p.y);
}

Status validate(const BlocksparseWeightGradParams& p) {
  constexpr const char* op = "blocksparse_weight_grad";
  SBNET_CHECK(p.pairs >= 1 && p.pairs <= kMaxWeightGradPairs, "%s: pairs: expected 1 to %d, got %d", op,
              kMaxWeightGradPairs, p.pairs);
  const DType dtype = p.x[0].dtype;
  SBNET_TRY(check_dtype(op, dtype));
  SBNET_TRY(check_layout(op, p.layout));
  SBNET_CHECK(p.dw_dtype == dtype || p.dw_dtype == DType::kF32,
              "%s: out: expected %s, the dtype of x, or float32, got %s", op, dtype_name(dtype),
              dtype_name(p.dw_dtype));
  SBNET_CHECK(p.dw || !p.layout.shape.blocks, "%s: out: expected %lld blocks, got none", op,
              static_cast<long long>(p.layout.shape.blocks));
  SBNET_CHECK(p.plan_words >= 0 && (p.plan || !p.plan_words), "%s: plan: expected an address, got none for %lld words",
              op, static_cast<long long>(p.plan_words));
  const TensorView dw = flat(p.dw, p.layout.shape, p.dw_dtype);
  for (int i = 0; i < p.pairs; ++i) {
    SBNET_CHECK(p.x[i].dtype == dtype, "%s: pairs: expected %s, the dtype of the first x, got %s", op,
                dtype_name(dtype), dtype_name(p.x[i].dtype));
    SBNET_TRY(check_matrix(op, "x", p.x[i], p.layout.shape.in_features, p.x[i]));
    SBNET_TRY(check_matrix(op, "dy", p.dy[i], p.layout.shape.out_features, p.x[i]));
    SBNET_CHECK(!may_overlap(p.x[i], dw) && !may_overlap(p.dy[i], dw),
                "%s: out: expected a separate tensor, got memory of x or dy", op);
    SBNET_TRY(check_pixels(op, p.active, p.x[i]));
  }
  return ok_status();
}

}  // namespace sbnet
