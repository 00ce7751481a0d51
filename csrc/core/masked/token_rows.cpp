#include "core/masked/token_rows.h"

#include "core/grid.h"

namespace sbnet {
namespace {

Status check_rows(const char* op, const char* name, const Rows& rows, int64_t images) {
  SBNET_CHECK(rows.images == images || rows.images == 1, "%s: %s: expected %lld images or one, got %lld", op, name,
              static_cast<long long>(images), static_cast<long long>(rows.images));
  SBNET_CHECK(rows.rows < INT32_MAX && rows.images < INT32_MAX, "%s: %s: expected fewer than 2^31 rows", op, name);
  return ok_status();
}

Status check_out(const char* op, const Rows& out, int64_t channels) {
  SBNET_CHECK((out.rows <= 1 || out.row_stride >= channels) && (out.images <= 1 || out.image_stride > 0),
              "%s: out: expected rows of its own memory", op);
  return ok_status();
}

}  // namespace

Status validate(const PackTokensParams& p) {
  constexpr const char* kOp = "pack_tokens";
  SBNET_CHECK(p.height >= 0 && p.width >= 0 && p.prefix >= 0 && p.suffix >= 0 && p.tokens() <= p.capacity,
              "%s: capacity: expected at least the %lld tokens, got %d", kOp, static_cast<long long>(p.tokens()),
              p.capacity);
  return check_grid(kOp, p.grid);
}

Status validate(const MoveRowsParams& p) {
  constexpr const char* kOp = "move_rows";
  SBNET_TRY(check_rows(kOp, "x", p.x, p.out.images));
  if (p.table.data) {
    SBNET_TRY(check_rows(kOp, "table", p.table, p.out.images));
    SBNET_CHECK(!p.index && p.start <= p.table.rows, "%s: table: expected at least %lld rows and no index", kOp,
                static_cast<long long>(p.start));
  }
  SBNET_CHECK(p.start >= 0, "%s: start: expected at least 0, got %lld", kOp, static_cast<long long>(p.start));
  SBNET_CHECK(p.element_bytes == 2 || p.element_bytes == 4, "%s: x: expected float32, float16 or bfloat16", kOp);
  return check_out(kOp, p.out, p.channels);
}

Status validate(const PackPatchesParams& p) {
  constexpr const char* kOp = "pack_patches";
  SBNET_TRY(check_plane(kOp, "x", p.x));
  SBNET_CHECK(is_compute_dtype(p.x.dtype), "%s: x: expected float32, float16 or bfloat16, got %s", kOp,
              dtype_name(p.x.dtype));
  SBNET_CHECK(p.patch[0] >= 1 && p.patch[1] >= 1 && p.x.size[0] == p.out.images,
              "%s: patch: expected at least 1 x 1, and the images of out", kOp);
  SBNET_CHECK(size_product({p.x.size[1], p.patch[0], p.patch[1]}) < INT32_MAX, "%s: patch: expected fewer numbers",
              kOp);
  return check_out(kOp, p.out, p.x.size[1] * p.patch[0] * p.patch[1]);
}

Status validate(const MergePixelsParams& p) {
  constexpr const char* kOp = "merge_pixels";
  const TensorView &x = p.x, &y = p.out;
  SBNET_TRY(check_plane(kOp, "x", x));
  SBNET_TRY(check_plane(kOp, "out", y));
  SBNET_CHECK(is_compute_dtype(x.dtype) && x.dtype == y.dtype,
              "%s: x: dtype: expected float32, float16 or bfloat16, and that of out, got %s and %s", kOp,
              dtype_name(x.dtype), dtype_name(y.dtype));
  SBNET_CHECK(p.factor >= 1 && p.count >= 1 && p.count <= kMostOffsets, "%s: offsets: expected 1 to %d, got %d", kOp,
              kMostOffsets, p.count);
  SBNET_CHECK(y.size[0] == x.size[0] && y.size[1] == x.size[1] * p.count,
              "%s: out: expected the images of x and %d times its channels", kOp, p.count);
  for (int s = 0; s < p.count; ++s)
    for (int d = 0; d < 2; ++d)
      SBNET_CHECK(p.offsets[s][d] >= 0 && (y.size[2 + d] - 1) * p.factor + p.offsets[s][d] < x.size[2 + d],
                  "%s: offsets: expected pixels of x, got (%d, %d)", kOp, p.offsets[s][0], p.offsets[s][1]);
  for (const TensorView* t : {&x, &y})
    SBNET_CHECK(t->size[1] <= 1 || t->stride[1] == 1, "%s: x, out: expected channels_last memory", kOp);
  SBNET_TRY(check_written(kOp, "out", y.size, y.stride));
  SBNET_CHECK(!may_overlap(x, y), "%s: out: expected memory of its own, got that of x", kOp);
  SBNET_TRY(check_grid(kOp, p.grid));
  return check_tiling(kOp, p.grid, y.size[2], y.size[3]);
}

}  // namespace sbnet
