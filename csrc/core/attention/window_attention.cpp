#include "core/attention/window_attention.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/grid.h"

namespace sbnet {
namespace {

constexpr const char* kOp = "window_attention";

Status check_rows(const char* name, const TensorView& t, const TensorView& q, int64_t start, int64_t channels) {
  SBNET_TRY(check_plane(kOp, name, t));
  SBNET_CHECK(t.dtype == q.dtype, "%s: %s: dtype: expected that of q, %s, got %s", kOp, name, dtype_name(q.dtype),
              dtype_name(t.dtype));
  SBNET_CHECK(t.size[0] == q.size[0], "%s: %s: expected the %lld images of q, got %lld", kOp, name,
              static_cast<long long>(q.size[0]), static_cast<long long>(t.size[0]));
  SBNET_CHECK(start >= 0 && start <= t.size[1] && channels <= t.size[1] - start,
              "%s: %s: expected %lld channels from %lld on, got %lld in all", kOp, name,
              static_cast<long long>(channels), static_cast<long long>(start), static_cast<long long>(t.size[1]));
  SBNET_CHECK((t.size[1] <= 1 || t.stride[1] == 1) &&
                  (t.size[2] <= 1 || t.stride[2] == t.size[3] * WindowAttentionParams::stride(t)),
              "%s: %s: expected channels_last memory", kOp, name);
  SBNET_CHECK(t.size[2] * t.size[3] < INT32_MAX, "%s: %s: expected fewer than 2^31 pixels", kOp, name);
  return ok_status();
}

Status check_words(const char* name, const TensorView& t, int64_t start) {
  const int64_t stride = WindowAttentionParams::stride(t), unit = 16 / dtype_size(t.dtype);
  SBNET_CHECK(reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && stride % unit == 0 && start % unit == 0 &&
                  (t.size[0] <= 1 || t.stride[0] % unit == 0),
              "%s: %s: expected pixels and channels that begin at multiples of 16 bytes", kOp, name);
  return ok_status();
}

bool has_channels(int32_t dim) { return dim >= 8 && dim <= 128 && dim % 8 == 0; }

// A tile of the fewest rows.
WindowTile smallest_tile(bool is_float, int32_t dim, int32_t value_dim) {
  return is_float ? WindowTile::of_floats() : WindowTile::of_halves(64, std::max(dim, value_dim) <= 64 ? 64 : 128);
}

bool fits(bool is_float, int32_t dim, int32_t value_dim, int32_t keys, int32_t table_rows, int32_t table_columns) {
  return table_rows <= kMostTableSide && table_columns <= kMostTableSide &&
         smallest_tile(is_float, dim, value_dim).bytes(keys, table_rows, table_columns) <= kWindowShared;
}

}  // namespace

Status validate(const WindowAttentionParams& p) {
  SBNET_CHECK(is_compute_dtype(p.q.dtype), "%s: q: dtype: expected float32, float16 or bfloat16, got %s", kOp,
              dtype_name(p.q.dtype));
  SBNET_CHECK(p.heads >= 1 && p.dim >= 1 && p.value_dim >= 1,
              "%s: heads, dim, value_dim: expected heads of at least a channel, got %d of %d and %d", kOp, p.heads,
              p.dim, p.value_dim);
  const int64_t width = int64_t{p.heads} * p.dim, deep = int64_t{p.heads} * p.value_dim;
  SBNET_TRY(check_rows("q", p.q, p.q, p.starts[0], width));
  SBNET_TRY(check_rows("k", p.k, p.q, p.starts[1], width));
  SBNET_TRY(check_rows("v", p.v, p.q, p.starts[2], deep));
  SBNET_TRY(check_rows("out", p.out, p.q, 0, deep));
  SBNET_CHECK(p.out.size[1] == deep && p.out.size[2] == p.q.size[2] && p.out.size[3] == p.q.size[3],
              "%s: out: expected %lld channels of the plane of q, %lld x %lld, got %lld of %lld x %lld", kOp,
              static_cast<long long>(deep), static_cast<long long>(p.q.size[2]), static_cast<long long>(p.q.size[3]),
              static_cast<long long>(p.out.size[1]), static_cast<long long>(p.out.size[2]),
              static_cast<long long>(p.out.size[3]));
  SBNET_TRY(check_written(kOp, "out", p.out.size, p.out.stride));
  SBNET_CHECK(!may_overlap(p.out, p.q) && !may_overlap(p.out, p.k) && !may_overlap(p.out, p.v),
              "%s: out: expected memory of its own, got that of q, k or v", kOp);
  SBNET_CHECK(p.v.size[2] == p.k.size[2] && p.v.size[3] == p.k.size[3],
              "%s: v: expected the plane of k, %lld x %lld, got %lld x %lld", kOp, static_cast<long long>(p.k.size[2]),
              static_cast<long long>(p.k.size[3]), static_cast<long long>(p.v.size[2]),
              static_cast<long long>(p.v.size[3]));
  SBNET_CHECK(p.active_keys || (p.k.size[2] == p.q.size[2] && p.k.size[3] == p.q.size[3]),
              "%s: active_keys: expected them where keys are of another plane than q, got none", kOp);
  for (const auto& [listed, count] : {std::pair{&p.listed_rows, p.queries()}, {&p.listed_keys, p.pixels_of_keys()}})
    SBNET_CHECK(!listed->order || (p.windows == 1 && (listed == &p.listed_rows ? p.rows : p.keys) == count),
                "%s: row_order, key_order: expected them of one window of all pixels, got %d windows", kOp, p.windows);
  SBNET_CHECK(p.windows >= 0 && p.rows >= 0 && p.keys >= 0 && size_product({p.windows, p.rows}) < INT32_MAX,
              "%s: rows: expected fewer than 2^31 in all", kOp);
  SBNET_CHECK(std::isfinite(p.scale) && std::isfinite(p.normalize) && p.normalize >= 0,
              "%s: scale, normalize: expected finite numbers, the second at least 0, got %g and %g", kOp, p.scale,
              p.normalize);
  SBNET_TRY(check_grid(kOp, p.grid));
  SBNET_TRY(check_tiling(kOp, p.grid, p.q.size[2], p.q.size[3]));
  SBNET_CHECK(p.block_map || !p.q.size[0], "%s: active: expected a block map, got none", kOp);
  SBNET_CHECK(!p.row_table || (p.rows == p.keys && int64_t{p.table_rows} * p.table_columns == p.rows),
              "%s: row_table, column_table: expected tables of %d rows and %d columns to be of windows of as many, "
              "got %d queries and %d keys",
              kOp, p.table_rows, p.table_columns, p.rows, p.keys);
  return ok_status();
}

Status validate_on_cuda(const WindowAttentionParams& p) {
  SBNET_TRY(validate(p));
  SBNET_CHECK(has_channels(p.dim) && has_channels(p.value_dim),
              "%s: dim, value_dim: expected heads of 8 to 128 channels on CUDA, a multiple of 8, got %d and %d", kOp,
              p.dim, p.value_dim);
  SBNET_CHECK(p.keys <= kMostWindowKeys, "%s: keys: expected at most %d of a window on CUDA, got %d", kOp,
              kMostWindowKeys, p.keys);
  SBNET_TRY(check_words("q", p.q, p.starts[0]));
  SBNET_TRY(check_words("k", p.k, p.starts[1]));
  SBNET_TRY(check_words("v", p.v, p.starts[2]));
  SBNET_TRY(check_words("out", p.out, 0));
  SBNET_CHECK(!p.bias.data || !p.row_table, "%s: bias: expected none beside tables", kOp);
  SBNET_CHECK(fits(p.q.dtype == DType::kF32, p.dim, p.value_dim, p.keys, p.table_rows, p.table_columns),
              "%s: row_table, column_table: expected fewer rows and columns, got %d and %d", kOp, p.table_rows,
              p.table_columns);
  return ok_status();
}

}  // namespace sbnet

int32_t sbnet_window_attention_takes(int32_t is_float, int32_t dim, int32_t value_dim, int32_t keys, int32_t table_rows,
                                     int32_t table_columns) {
  using namespace sbnet;
  return has_channels(dim) && has_channels(value_dim) && keys <= kMostWindowKeys &&
         fits(is_float, dim, value_dim, keys, table_rows, table_columns);
}
